// How a backward launch assigns blocks to the items.
#pragma once

#include <vector>

#include "schedule/backward.h"
#include "schedule/backward_costs.h"

namespace magi {

// A lane is the part of a kv head's query heads that a block has: lanes are the kv heads, each with
// its splits. The order of the blocks: sections of `lanes_per_section` lanes outermost, then items
// in list order, then the lanes of the section.
struct BwdSchedule {
  int64_t num_splits = 1;         // blocks that share the query heads of one kv head
  int64_t lanes_per_section = 1;  // whole kv heads, or a single lane
  bool in_turns = false;    // parts of a tile add to one sum (attention/backward/split_tiles.cuh)
  int64_t whole_heads = 0;  // kv heads before all sections that are not split, one by one
  int64_t band_rows = 0;    // of the bands that the list is cut into; 0: it is not
  double makespan = 0.;     // of the busiest processor, in steps, with the penalties below
};

struct BwdMode {
  bool deterministic = false;
  bool may_take_turns = true;  // parts of a tile, in fast mode
};

// What is launched, and where.
struct BwdShape {
  int64_t group = 1;  // query heads of a kv head
  int64_t num_heads_kv = 1;
  int64_t num_sms = 132;
  int64_t head_bytes = 0;  // of Q, dO and dQ of one query head
  int64_t num_q = 0;
};

// Those that may be chosen, in the order of preference. The first one is chosen whose makespan is
// at most `tolerance` times the least.
struct BwdSchedules {
  std::vector<BwdSchedule> all;
  double tolerance = 1.;
};

// Few kv heads at a time keep Q, dO and dQ in the cache; many let long items of all heads start
// early, so that no long item is left at the end. Splits cost a pass over partial dK and dV, but
// keep items of different length from drifting apart. The function simulates the launch on
// `num_sms` processors, adds the known cost of cache misses, and takes the first choice within 0.5
// % of the best. Scattered blocks, and items of one document that differ in length, may also run
// one split of one kv head at a time. Where parts may take turns, the last kv head alone may be
// split, so that processors end together, and long even items be cut into bands of rows. In
// deterministic mode the simulation has the waits, the cost of cache misses is another one but at
// head_dim 256, each section has at least two lanes, as far as there are so many, and the best
// choice is taken, at head_dim 256 the one with the fewest of them within 1.5 %.
BwdSchedule choose_bwd_schedule(const BwdWorkList& list, const BwdShape& shape, const BwdMode& mode,
                                const BwdCosts& costs = kBwdCosts);

// All that the choice is made from, for those who fit the costs.
BwdSchedules bwd_schedules(const BwdWorkList& list, const BwdShape& shape, const BwdMode& mode,
                           const BwdCosts& costs);

}  // namespace magi
