// The first assignment of chunks to ranks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace magi {

// Longest processing time first (Graham 1969) with equal counts: chunks are taken by falling load
// (ties: lower index first), and each goes to the least loaded rank that still has room (ties:
// lower rank). `loads` has a multiple of `cp_size` entries. Result: [num_chunks] ranks.
std::vector<int32_t> dispatch_lpt(std::span<const int64_t> loads, int64_t cp_size);

// Load per rank: [cp_size].
std::vector<int64_t> rank_loads(std::span<const int64_t> loads, std::span<const int32_t> ranks,
                                int64_t cp_size);

}  // namespace magi
