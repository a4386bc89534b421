// The choice of the forward kernel and its work list.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "planner/slices.h"
#include "schedule/forward.h"
#include "schedule/forward_costs.h"
#include "schedule/launch_heads.h"

namespace magi {

// How a kernel tiles the rows of a query head group.
struct FwdVariant {
  int64_t pack = 1;       // query heads in one tile's rows
  int64_t block_m = 128;  // query rows of a tile, tokens x pack
  int64_t block_n = 128;  // keys of a tile
};

// What is launched, and where.
struct FwdShape {
  int64_t num_q = 0;
  int64_t num_k = 0;
  LaunchHeads heads;
  int64_t num_sms = 132;
};

struct FwdChoice {
  FwdVariant variant;
  FwdWorkList work;
  double cost = 0.;               // estimated time, in reference steps (FwdCosts)
  int64_t heads_per_section = 1;  // kv heads that are walked together
};

// The variants that are compiled for a head_dim, with as many heads packed as possible or none.
std::vector<FwdVariant> fwd_variants(const LaunchHeads& heads);

// The choice with the least estimated time among all variants, each with its list as it is and, if
// the longest walk is at least twice a processor's even share, with long walks cut into parts. The
// estimate sums steps; for few items it simulates the launch. Throws std::invalid_argument like
// `build_fwd_work_list`, and for a head_dim without kernels.
FwdChoice choose_fwd(std::span<const Slice> slices, const FwdShape& shape,
                     const FwdCosts& costs = kFwdCosts);

// All that the choice is made from, for those who fit the costs: the list of each variant, and with
// it as it is or cut into parts, what is compared.
FwdWorkList fwd_whole_list(std::span<const Slice> slices, const FwdShape& shape,
                           const FwdVariant& variant, const FwdCosts& costs);
std::vector<FwdChoice> fwd_choices(FwdWorkList whole, const FwdShape& shape,
                                   const FwdVariant& variant, const FwdCosts& costs);

}  // namespace magi
