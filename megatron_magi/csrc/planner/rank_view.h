// One rank's part of a plan: its slices in local coordinates and its send and receive tables.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "planner/layout.h"
#include "planner/needs.h"

namespace magi {

// Both directions of one stage's exchange, as one rank sees it.
struct CastTable {
  std::vector<Range> send_ranges;    // local rows, ordered by destination, then row
  std::vector<int64_t> send_counts;  // rows per destination: [cp_size]
  std::vector<int64_t> recv_counts;  // rows per source: [cp_size]
  std::vector<Range> recv_ranges;    // global rows in buffer order: by source, then row
};

// `transfers` of one stage, ordered by (dst, src, row); all ranks' rows.
CastTable cast_table(std::span<const Transfer> transfers, const Layout& layout, int32_t rank);

// The mask's cells with queries in `queries` and keys in `keys`, moved to (local row, buffer row).
// `queries` ascending, `keys` in buffer order. Fragments that are one slice again are joined, since
// a kernel pays for each. Canonical, ordered by (q_start, k_start, ...).
std::vector<Slice> local_slices(std::span<const Slice> slices, std::span<const Placed> queries,
                                std::span<const Placed> keys);

// The slice with exactly the cells of both, if there is one (they share no cell).
bool try_join(Slice& into, const Slice& other);

}  // namespace magi
