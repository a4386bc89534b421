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
  bool in_turns = false;          // parts of a tile add to one sum (attention/backward/parts.cuh)
  int64_t whole_heads = 0;        // kv heads before all sections that are not split, one by one
  int64_t band_rows = 0;          // of the bands that the list is cut into; 0: it is not
  double makespan = 0.;           // of the busiest processor, in steps, with the penalties below
};

// Which schedules are asked for.
struct BwdRules {
  int64_t fewest_lanes = 0;  // of a section, in deterministic mode; 0: fast mode
  bool may_take_turns = false;
};

// Few kv heads at a time keep Q, dO and dQ in the cache; many let long items of all heads start
// early, so that no long item is left at the end. Splits cost a pass over partial dK and dV, but
// keep items of different length from drifting apart. The function simulates the launch on
// `num_sms` processors, adds the known cost of cache misses, and takes the first choice within 0.5
// % of the best. Scattered blocks, and items of one document that differ in length, may also run
// one split of one kv head at a time. Where parts may take turns, the last kv head alone may be
// split, so that processors end together, and long even items be cut into bands of rows.
// `head_bytes` is the size of Q, dO and dQ of one query head. In deterministic mode the simulation
// has the waits, the cost of cache misses is another one but at head_dim 256, each section has at
// least `fewest_lanes` kv heads times splits, as far as there are so many, and the best choice is
// taken, at head_dim 256 the one with the fewest of them within 1.5 %.
BwdSchedule choose_bwd_schedule(const BwdWorkList& list, int64_t group, int64_t num_heads_kv,
                                int64_t num_sms, int64_t head_bytes, int64_t num_q,
                                const BwdRules& rules);

}  // namespace magi
