// The rows that are transferred: each rank's needs, the key rows of other ranks that its queries
// read.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/layout.h"
#include "planner/tile_costs.h"

namespace magi {

// Rows [rows.start, rows.end) go from rank `src` to rank `dst` in stage `stage`.
struct Transfer {
  int32_t stage = 0;
  int32_t dst = 0;
  int32_t src = 0;
  Range rows;
};

// Owners of queries and of keys. In self-attention both are one.
struct Homes {
  Layout queries;
  Layout keys;  // as many ranks
};

// Union of the keys that the rank's chunks read: ascending, not touching.
std::vector<Range> rank_needs(const RangeLists& chunk_keys, const Layout& layout, int32_t rank);

// All rows that one rank must receive, each once, ordered by (src, row): its needs without its own
// rows, cut where the owner changes. The stage of all transfers is 0.
std::vector<Transfer> rank_transfers(const RangeLists& chunk_keys, const Homes& homes,
                                     int32_t rank);

}  // namespace magi
