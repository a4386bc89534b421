// The order in which the items of the backward are launched and walk their queries.
//
// Blocks that run at the same time share Q, dO and dQ through the cache if they are at the same
// rows of the same head. Measured on an H200 (50 MiB of L2; docs/design/backward_kernel.md) with 64
// packed causal documents: 467 TFLOP/s with the longest items first, 537 document by document.
#pragma once

#include "schedule/backward.h"

namespace magi {

// Sets the walk (`descending`, `heads_inner`), sorts the items and fills `grouped` and the rows
// over which items spread. Expects the items in key order.
void order_items(BwdWorkList& list, bool deterministic);

}  // namespace magi
