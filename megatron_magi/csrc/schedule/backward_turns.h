// Deterministic mode of the backward: the order in which items add to each query row.
//
// Blocks start in the order of the items, and an entry adds to a row group behind the entry that
// launched last before it among those which add to this row group. So a block waits for earlier
// blocks only, which run or have finished, and there is no circle. The rows of an entry mostly wait
// for one other entry. The lists say for how many row groups that is so; their length is about that
// of the entries, however many steps these have.
#pragma once

#include <span>

#include "schedule/backward.h"

namespace magi {

// Fills `segments`, `places`, `turns` and `num_row_groups` for the items in launch order.
void number_turns(BwdWorkList& list, std::span<const Slice> slices, int64_t num_q);

// The visits of all steps, in the order of items and walk, as the kernel computes them.
std::vector<BwdVisit> visits_of(const BwdWorkList& list);

}  // namespace magi
