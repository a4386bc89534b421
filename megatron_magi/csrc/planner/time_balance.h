// Trades of chunks that make the predicted times of the ranks' kernels equal.
//
// The search counts tiles, because a chunk's tiles are the same on every rank. The kernels' time
// also depends on how a rank's chunks fit together: where documents begin, how many keys the rank
// receives, and whether its longest blocks end with the others. So the ranks' times are predicted
// for the result. Where they differ by more than is allowed, a rank's load becomes its share of the
// predicted time, and trades bring the slowest ranks under the cap, at little cost in rows. Chunks
// are halved if they are too coarse for that.
#pragma once

#include "planner/chunking.h"
#include "planner/rank_clock.h"

namespace magi {

// `found` itself, or the layout with the fastest slowest rank that a few rounds of trades reached.
Dispatch balance_times(const DispatchProblem& problem, const RankClock& clock, Dispatch found);

}  // namespace magi
