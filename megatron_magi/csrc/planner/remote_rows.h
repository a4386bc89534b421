// The rows of a rank that must wait for keys of other ranks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "planner/layout.h"
#include "planner/required_rows.h"

namespace magi {

// The rank's rows that see a key of another rank: ascending global ranges, not touching.
std::vector<Range> remote_rows(std::span<const Slice> slices, const Homes& homes, int32_t rank);

// The rank's other rows, padding included: ascending global ranges.
std::vector<Range> other_rows(std::span<const Range> rows, const Layout& layout, int32_t rank);

// Visible cells of the rows in `ranges` (ascending, disjoint).
int64_t area_of_rows(std::span<const Slice> slices, std::span<const Range> ranges);

}  // namespace magi
