// Chunks trade ranks so that fewer rows travel, under a cap on every rank's load.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "solver/traffic.h"

namespace magi {

// Improves `chunk_ranks` in place with at most `trials` proposed swaps. No rank ends above
// `max_load` unless one began above it; then no rank ends above where the worst one began.
void swap_search(const Segments& segments, std::span<const int64_t> chunk_loads, int64_t cp_size,
                 int64_t max_load, int64_t trials, std::span<int32_t> chunk_ranks);

}  // namespace magi
