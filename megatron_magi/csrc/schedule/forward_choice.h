// Which forward kernel runs on which work list.
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
  int64_t head_dim = 128;  // of queries, keys and values
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

// The variants that are compiled for a head_dim, heads packed as far as they can be or not at all.
std::vector<FwdVariant> fwd_variants(const FwdHeads& heads);

// The choice of the least estimated time: every variant, and, where few tiles would leave most
// processors idle, the same tiles with long walks cut into parts. The estimate sums steps; where
// there are few tiles it simulates the launch. Throws std::invalid_argument as
// `build_fwd_work_list`, and for a head_dim without kernels.
FwdChoice choose_fwd(std::span<const Slice> slices, int64_t num_q, int64_t num_k,
                     const FwdHeads& heads, int64_t num_sms);

// How many kv heads' K and V of so many keys fit in the L2, spread evenly over the sections.
int64_t heads_that_fit(int64_t active_keys, const FwdHeads& heads);

}  // namespace magi
