// Chunks trade ranks so that fewer rows travel, under a cap on every rank's load.
//
// Many levels, coarse to fine: blocks of 8, 4, 2 neighbouring chunks move as one before single
// chunks do, since a document moved piece by piece costs more before it costs less. Each level is
// threshold accepting (Dueck, Scheuer 1990): a random trade is taken if it is not worse than a
// falling threshold. Loads outside their limits have a rising price, so that the search may pass
// through unbalanced states; what is left over the cap in the end is repaired, and the last part of
// the budget is spent under the cap as a hard limit. Integers and an own generator throughout: the
// same trades on every machine.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "planner/traffic.h"

namespace magi {

struct SwapProblem {
  const Segments& segments;
  std::span<const int64_t> chunk_loads;  // tiles
  int64_t cp_size = 0;                   // ranks
  int64_t chunk_size = 0;                // rows
  int64_t max_load = 0;                  // tiles a rank may hold
  int64_t trials = 0;  // proposed trades; a fifth more where balance must be tried again
};

// Trials that pay on problems of one node (docs/planner.md) and keep large ones in tens of
// milliseconds: 700 per chunk, 150 per chunk above 180 chunks.
int64_t default_swap_trials(int64_t num_chunks);

// The better of `start` and what the search finds. No rank ends above `max_load` unless it could
// not be brought below; then no rank ends above where the worst one began.
std::vector<int32_t> swap_search(const SwapProblem& problem, std::vector<int32_t> start);

}  // namespace magi
