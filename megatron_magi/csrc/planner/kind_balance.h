// Balance of every mask of a model by itself: layers exchange rows, so ranks wait in each of them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "planner/traffic.h"

namespace magi {

// The layers with one mask.
struct LayerKind {
  std::vector<int64_t> chunk_loads;  // tiles of all these layers
  int64_t cap = 0;                   // the most that a rank should have of them
};

// Tiles of the fullest rank of every kind: what a step waits for.
int64_t sum_of_fullest(std::span<const LayerKind> kinds, std::span<const int32_t> ranks,
                       int64_t cp_size);

// Trades chunks until no rank is above a cap, or no trade lowers the excess, summed over ranks and
// kinds. Each step takes the cheapest in rows among the trades that lower it most.
std::vector<int32_t> balance_kinds(const Segments& segments, std::span<const LayerKind> kinds,
                                   int64_t cp_size, std::vector<int32_t> ranks);

}  // namespace magi
