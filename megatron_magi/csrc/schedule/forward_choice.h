// The choice of the forward kernel and its work list.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "planner/slices.h"
#include "schedule/forward.h"

namespace magi {

struct FwdHeads {
  int64_t heads_q = 1;
  int64_t heads_kv = 1;
  int64_t head_dim = 128;  // of queries and keys
};

// How a kernel tiles the rows of a query head group.
struct FwdVariant {
  int64_t pack = 1;       // query heads in one tile's rows
  int64_t block_m = 128;  // query rows of a tile, tokens x pack
  int64_t block_n = 128;  // keys of a tile
};

struct FwdChoice {
  FwdVariant variant;
  FwdWorkList work;
  double cost = 0.;               // estimated time, in 128 x 128 steps of head_dim 128
  int64_t heads_per_section = 1;  // kv heads that are walked together
};

// The variants that are compiled for a head_dim, with as many heads packed as possible or none.
std::vector<FwdVariant> fwd_variants(const FwdHeads& heads);

// The choice with the least estimated time among all variants and, if few tiles would leave most
// processors idle, the same tiles with long walks cut into parts. The estimate sums steps; for few
// tiles it simulates the launch. Throws std::invalid_argument like `build_fwd_work_list`, and for a
// head_dim without kernels.
FwdChoice choose_fwd(std::span<const Slice> slices, int64_t num_q, int64_t num_k,
                     const FwdHeads& heads, int64_t num_sms);

// The number of kv heads that are walked together, spread evenly over the sections: those whose K
// and V fit in the L2, and more where these would give the processors too few items, because a
// section's longest items are followed by its shortest ones, which fill the end of the launch
// alone.
int64_t heads_per_section(const FwdWorkList& work, const FwdHeads& heads, const FwdVariant& variant,
                          int64_t num_sms);

}  // namespace magi
