// The time of every rank's kernels under a layout.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "planner/layout.h"
#include "planner/rank_clock.h"

namespace magi {

// The chunks' ranks and the ranks' times.
struct TimedChunks {
  std::vector<int32_t> chunk_ranks;
  std::vector<int64_t> times;
};

// Times of all ranks: [cp_size]. The clock is asked for those ranks alone that may differ from
// `before`, a layout of as many chunks.
std::vector<int64_t> rank_times(std::span<const Slice> slices, const Layout& layout,
                                const RankClock& clock,
                                const std::optional<TimedChunks>& before = std::nullopt);

// Whether times can be had in reasonable time: views of all ranks go through their slices.
bool can_time(std::span<const Slice> slices, const Layout& layout);

// Parts of `total` in proportion to the times, or equal ones if all times are 0.
std::vector<int64_t> shares(std::span<const int64_t> times, int64_t total);

}  // namespace magi
