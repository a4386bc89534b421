// One rank's part of a plan: its slices in local coordinates and its send and receive tables.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "planner/layout.h"
#include "planner/required_rows.h"

namespace magi {

// Both directions of one stage's exchange, as one rank sees it.
struct CastTable {
  std::vector<Range> send_ranges;    // local rows, ordered by destination, then row
  std::vector<int64_t> send_counts;  // rows per destination: [cp_size]
  std::vector<int64_t> recv_counts;  // rows per source: [cp_size]
  std::vector<Range> recv_ranges;    // global rows in buffer order: by source, then row
};

// `transfers` are those of one stage and of all ranks, ordered by (dst, src, row).
CastTable cast_table(std::span<const Transfer> transfers, const Layout& layout, int32_t rank);

// The mask's cells with queries in `queries` and keys in `keys`, moved to (local row, buffer row).
// `queries` are ascending, `keys` in buffer order. Fragments that form one slice are joined,
// because each slice costs a kernel time. The result is canonical, ordered by (q_start, k_start,
// ...).
std::vector<Slice> local_slices(std::span<const Slice> slices, std::span<const Placed> queries,
                                std::span<const Placed> keys);

// Joins `other`, which shares no cell with `into`, if one slice has exactly the cells of both;
// returns whether it did.
bool try_join(Slice& into, const Slice& other);

}  // namespace magi
