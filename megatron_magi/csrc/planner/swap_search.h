// Trades of chunks between ranks that lower the number of transferred rows, under a cap on loads.
//
// The search has several levels, coarse to fine: blocks of 8, 4 and 2 neighbouring chunks move as
// one before single chunks do, because a document that is moved piece by piece costs more before it
// costs less. Each level is threshold accepting (Dueck, Scheuer 1990): a random trade is taken if
// it is not worse than a falling threshold. Loads outside their limits have a rising price, so the
// search may pass through unbalanced states. Loads that end above the cap are repaired, and the
// last part of the budget is spent with the cap as a hard limit. All arithmetic is in integers and
// the random numbers are our own, so every machine makes the same trades.
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
  int64_t max_load = 0;                  // the most tiles that a rank may have
  int64_t trials = 0;  // proposed trades; a fifth more if balance must be tried again
};

// A number of trials that is worthwhile for problems of one node (docs/design/planner.md) and keeps
// large problems within tens of milliseconds: 700 per chunk, and 150 per chunk above 180 chunks.
int64_t default_swap_trials(int64_t num_chunks);

// The better of `start` and the result of the search. No rank ends above `max_load`, unless this
// cannot be reached; then no rank ends above the highest load of `start`.
std::vector<int32_t> swap_search(const SwapProblem& problem, std::vector<int32_t> start);

}  // namespace magi
