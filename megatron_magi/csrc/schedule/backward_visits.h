// Deterministic mode of the backward: the order in which items add to each query row.
#pragma once

#include "schedule/backward.h"

namespace magi {

// Fills `visits`, `num_row_groups` and the items' `visit_begin` for the items in launch order.
void number_visits(BwdWorkList& list, int64_t num_q, int64_t tile_q);

}  // namespace magi
