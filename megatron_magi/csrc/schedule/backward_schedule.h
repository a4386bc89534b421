// How a backward launch assigns blocks to the items.
#pragma once

#include "schedule/backward.h"

namespace magi {

// A lane is the part of a kv head's query heads that a block has: lanes are the kv heads, each with
// its splits. The order of the blocks: sections of `lanes_per_section` lanes outermost, then items
// in list order, then the lanes of the section.
struct BwdSchedule {
  int64_t num_splits = 1;         // blocks that share the query heads of one kv head
  int64_t lanes_per_section = 1;  // whole kv heads, or a single lane
  double makespan = 0.;           // of the busiest processor, in steps, with the penalties below
};

// The cost of a block in steps.
double bwd_block_cost(const BwdItem& item, int64_t group, int64_t num_splits);

// Few kv heads at a time keep Q, dO and dQ in the cache; many let long items of all heads start
// early, so that no long item is left at the end. Splits cost a pass over partial dK and dV, but
// keep items of different length from drifting apart. The function simulates the launch on
// `num_sms` processors, adds the known cost of cache misses, and takes the first choice within 0.5
// % of the best. Scattered blocks may also run one split of one kv head at a time. `head_bytes` is
// the size of Q, dO and dQ of one query head. `fewest_lanes`
// is 0 in fast mode. In deterministic mode the simulation has the waits, the cost of cache misses
// is another one but at head_dim 256, each section has at least so many kv heads times splits, as
// far as there are so many, and the best choice is taken, at head_dim 256 the one with the fewest
// of them within 1.5 %.
BwdSchedule choose_bwd_schedule(const BwdWorkList& list, int64_t group, int64_t num_heads_kv,
                                int64_t num_sms, int64_t head_bytes, int64_t num_q,
                                int64_t fewest_lanes);

}  // namespace magi
