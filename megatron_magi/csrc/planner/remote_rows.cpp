#include "planner/remote_rows.h"

#include <algorithm>

#include "planner/tile_costs.h"

namespace magi {
namespace {

// The first range that ends after `row`.
template <class Ranges, class End>
auto first_behind(const Ranges& ranges, int64_t row, const End& end) {
  return std::ranges::upper_bound(ranges, row, {}, end);
}

int64_t end_of_run(const Placed& run) {
  return run.rows.end;
}

// Adds the rows of `part` that see a key outside `runs`.
void add_rows_that_look_outside(const Slice& part, std::span<const Placed> runs,
                                std::vector<Range>& rows) {
  const auto add = [&](int64_t begin, int64_t end) {
    if (begin >= end) return;
    const Slice outside = cut(part, {part.q_start, part.q_end}, {begin, end});
    if (!outside.empty()) rows.push_back({outside.q_start, outside.q_end});
  };
  int64_t at = part.k_start;
  for (auto k = first_behind(runs, at, end_of_run); k != runs.end() && k->rows.start < part.k_end;
       ++k) {
    add(at, k->rows.start);
    at = k->rows.end;
  }
  add(at, part.k_end);
}

}  // namespace

std::vector<Range> remote_rows(std::span<const Slice> slices, const Homes& homes, int32_t rank) {
  const std::vector<Placed> runs = local_runs(homes.queries, rank);
  const std::vector<Placed> keys = local_runs(homes.keys, rank);
  RangeLists found{{0, 0}, {}};
  for (const Slice& slice : slices) {
    for (auto q = first_behind(runs, slice.q_start, end_of_run);
         q != runs.end() && q->rows.start < slice.q_end; ++q) {
      const Slice part = cut(slice, q->rows, {slice.k_start, slice.k_end});
      if (!part.empty()) add_rows_that_look_outside(part, keys, found.ranges);
    }
  }
  found.begin[1] = static_cast<int64_t>(found.ranges.size());
  join_lists(found);
  return found.ranges;
}

std::vector<Range> other_rows(std::span<const Range> rows, const Layout& layout, int32_t rank) {
  std::vector<Range> others;
  auto next = rows.begin();
  for (const Placed& run : local_runs(layout, rank)) {
    int64_t at = run.rows.start;
    for (; next != rows.end() && next->start < run.rows.end; ++next) {
      if (at < next->start) others.push_back({at, next->start});
      at = next->end;
    }
    if (at < run.rows.end) others.push_back({at, run.rows.end});
  }
  return others;
}

int64_t area_of_rows(std::span<const Slice> slices, std::span<const Range> ranges) {
  const auto end_of = [](const Range& range) { return range.end; };
  int64_t total = 0;
  for (const Slice& slice : slices) {
    for (auto rows = first_behind(ranges, slice.q_start, end_of);
         rows != ranges.end() && rows->start < slice.q_end; ++rows) {
      total += area(cut(slice, *rows, {slice.k_start, slice.k_end}));
    }
  }
  return total;
}

}  // namespace magi
