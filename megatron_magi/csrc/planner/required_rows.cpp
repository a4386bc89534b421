#include "planner/required_rows.h"

#include <algorithm>

namespace magi {

std::vector<Range> rank_needs(const RangeLists& chunk_keys, const Layout& layout, int32_t rank) {
  RangeLists one;
  for (int64_t c = 0; c < layout.num_chunks(); ++c) {
    if (layout.chunk_ranks[c] != rank) continue;
    const auto keys = chunk_keys.of(c);
    one.ranges.insert(one.ranges.end(), keys.begin(), keys.end());
  }
  one.begin = {0, static_cast<int64_t>(one.ranges.size())};
  join_lists(one);
  return one.ranges;
}

std::vector<Transfer> rank_transfers(const RangeLists& chunk_keys, const Homes& homes,
                                     int32_t rank) {
  const Layout& layout = homes.keys;
  // 1. Go through the needed rows chunk by chunk, and join neighbours of one owner.
  std::vector<Transfer> found;
  std::vector<int64_t> count(layout.cp_size + 1);
  for (const Range& need : rank_needs(chunk_keys, homes.queries, rank)) {
    bool joinable = false;
    for (int64_t c = need.start / layout.chunk_size; layout.chunk(c).start < need.end; ++c) {
      const int32_t src = layout.chunk_ranks[c];
      const int64_t end = std::min(need.end, layout.chunk(c).end);
      if (joinable && src == found.back().src) {
        found.back().rows.end = end;
      } else if (src != rank) {
        found.push_back({0, rank, src, {std::max(need.start, layout.chunk(c).start), end}});
        ++count[src + 1];
      }
      joinable = src != rank;
      if (c + 1 == layout.num_chunks()) break;
    }
  }
  // 2. Order by source. Rows of one source already ascend, and counting sort is stable.
  for (int64_t src = 0; src < layout.cp_size; ++src) count[src + 1] += count[src];
  std::vector<Transfer> sorted(found.size());
  for (const Transfer& transfer : found) sorted[count[transfer.src]++] = transfer;
  return sorted;
}

}  // namespace magi
