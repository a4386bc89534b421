// The cost of a piece of the query axis (in kernel tiles), and the keys that it reads.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "planner/slices.h"

namespace magi {

// Lists of ranges: `of(i)` is the i-th list. The ranges of a list are ascending and do not touch.
struct RangeLists {
  std::vector<int64_t> begin;  // [num_lists + 1], offsets into `ranges`
  std::vector<Range> ranges;

  std::span<const Range> of(int64_t i) const {
    return {ranges.data() + begin[i], ranges.data() + begin[i + 1]};
  }
};

// Sorts every list by start and joins ranges that overlap or touch, in place.
void join_lists(RangeLists& lists);

// For every block of `block` queries (block b holds rows [b * block, (b + 1) * block)): the keys
// that its rows read, exact to the row, as the union of the key ranges of the slices in the block.
RangeLists keys_by_block(std::span<const Slice> slices, int64_t block, int64_t num_blocks);

// The number of tiles that the kernel computes per q tile. A q tile is `tile_q` rows of one chunk,
// counted from the chunk's start (the last one may be short and costs as much, because the kernel
// computes a whole tile). Its cost is the number of `tile_k` blocks of the key axis in which one of
// its rows sees a key: a tile with one visible cell costs as much as a full tile, and two slices
// that meet in a tile cost one. Result: [num_chunks * ceil(chunk_size / tile_q)].
std::vector<int64_t> tile_loads(std::span<const Slice> slices, int64_t chunk_size,
                                int64_t num_chunks, int64_t tile_q, int64_t tile_k);

// Sums of `parts` neighbouring loads.
std::vector<int64_t> sum_groups(std::span<const int64_t> loads, int64_t parts);

}  // namespace magi
