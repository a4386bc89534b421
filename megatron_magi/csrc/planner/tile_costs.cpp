#include "planner/tile_costs.h"

#include <algorithm>

#include "planner/ceil_div.h"

namespace magi {
void join_lists(RangeLists& lists) {
  int64_t kept = 0;
  const int64_t num_lists = static_cast<int64_t>(lists.begin.size()) - 1;
  for (int64_t i = 0; i < num_lists; ++i) {
    const auto first = lists.ranges.begin() + lists.begin[i];
    const auto last = lists.ranges.begin() + lists.begin[i + 1];
    if (!std::ranges::is_sorted(first, last, {}, &Range::start)) {
      std::ranges::sort(first, last, {}, [](const Range& r) { return std::pair(r.start, r.end); });
    }
    lists.begin[i] = kept;
    for (auto range = first; range != last; ++range) {
      const Range next = *range;
      if (kept > lists.begin[i] && lists.ranges[kept - 1].end >= next.start) {
        lists.ranges[kept - 1].end = std::max(lists.ranges[kept - 1].end, next.end);
      } else {
        lists.ranges[kept++] = next;
      }
    }
  }
  lists.begin[num_lists] = kept;
  lists.ranges.resize(kept);
}

namespace {

// The key ranges that each query block reads, after `map`. Blocks are given by `rows_of(b)`
// (ascending, gaps allowed) and `block_of(row)`.
template <typename RowsOf, typename BlockOf, typename Map>
RangeLists collect(std::span<const Slice> slices, int64_t num_blocks, RowsOf rows_of,
                   BlockOf block_of, Map map) {
  RangeLists lists;
  lists.begin.assign(num_blocks + 1, 0);
  const auto for_each_range = [&](auto&& put) {
    for (const Slice& s : slices) {
      if (s.empty()) continue;
      const int64_t last = std::min(block_of(s.q_end - 1), num_blocks - 1);
      for (int64_t b = block_of(s.q_start); b <= last; ++b) {
        // A canonical slice sees keys on every row, and a range of rows sees one range of keys.
        const Range rows = rows_of(b);
        const int64_t q_start = std::max(s.q_start, rows.start);
        const int64_t q_end = std::min(s.q_end, rows.end);
        put(b, Range{std::max(s.k_start, q_start + s.d_lo), std::min(s.k_end, q_end + s.d_hi)});
      }
    }
  };
  for_each_range([&](int64_t b, Range) { ++lists.begin[b + 1]; });
  for (int64_t b = 0; b < num_blocks; ++b) lists.begin[b + 1] += lists.begin[b];
  lists.ranges.resize(lists.begin[num_blocks]);
  std::vector<int64_t> at(lists.begin.begin(), lists.begin.end() - 1);
  for_each_range([&](int64_t b, Range keys) { lists.ranges[at[b]++] = map(keys); });
  join_lists(lists);
  return lists;
}

}  // namespace

RangeLists keys_by_block(std::span<const Slice> slices, int64_t block, int64_t num_blocks) {
  return collect(
      slices, num_blocks, [=](int64_t b) { return Range{b * block, (b + 1) * block}; },
      [=](int64_t row) { return row / block; }, [](Range keys) { return keys; });
}

std::vector<int64_t> tile_loads(std::span<const Slice> slices, int64_t chunk_size,
                                int64_t num_chunks, int64_t tile_q, int64_t tile_k) {
  const int64_t per_chunk = ceil_div(chunk_size, tile_q);
  const auto rows_of = [=](int64_t t) {
    const int64_t chunk = t / per_chunk * chunk_size;
    const int64_t start = t % per_chunk * tile_q;
    return Range{chunk + start, chunk + std::min(start + tile_q, chunk_size)};
  };
  const auto tile_of = [=](int64_t row) {
    return row / chunk_size * per_chunk + row % chunk_size / tile_q;
  };
  const RangeLists tiles =
      collect(slices, num_chunks * per_chunk, rows_of, tile_of,
              [=](Range keys) { return Range{keys.start / tile_k, ceil_div(keys.end, tile_k)}; });
  std::vector<int64_t> loads(num_chunks * per_chunk);
  for (size_t t = 0; t < loads.size(); ++t) {
    for (const Range& range : tiles.of(static_cast<int64_t>(t))) loads[t] += range.size();
  }
  return loads;
}

std::vector<int64_t> sum_groups(std::span<const int64_t> loads, int64_t parts) {
  std::vector<int64_t> sums(loads.size() / parts);
  for (size_t i = 0; i < loads.size(); ++i) sums[i / parts] += loads[i];
  return sums;
}

}  // namespace magi
