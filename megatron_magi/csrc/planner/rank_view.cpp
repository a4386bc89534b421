#include "planner/rank_view.h"

#include <algorithm>
#include <tuple>

namespace magi {
namespace {

// Joins neighbours of the list where possible; returns whether any were joined.
bool join_neighbours(std::vector<Slice>& slices) {
  size_t kept = 0;
  for (size_t i = 0; i < slices.size(); ++i) {
    if (kept == 0 || !try_join(slices[kept - 1], slices[i])) slices[kept++] = slices[i];
  }
  const bool changed = kept < slices.size();
  slices.resize(kept);
  return changed;
}

void join_all(std::vector<Slice>& slices) {
  const auto by_rows = [](const Slice& s) {
    return std::tuple(s.q_start, s.q_end, s.k_start, s.k_end, s.d_lo, s.d_hi);
  };
  const auto by_keys = [](const Slice& s) {
    return std::tuple(s.k_start, s.k_end, s.q_start, s.q_end, s.d_lo, s.d_hi);
  };
  bool changed = true;
  while (changed) {
    std::ranges::sort(slices, {}, by_keys);
    changed = join_neighbours(slices);
    std::ranges::sort(slices, {}, by_rows);
    changed = join_neighbours(slices) || changed;
  }
}

}  // namespace

bool try_join(Slice& into, const Slice& other) {
  // Two disjoint slices are one slice iff their hull holds no other cell.
  const Slice hull{std::min(into.q_start, other.q_start), std::max(into.q_end, other.q_end),
                   std::min(into.k_start, other.k_start), std::max(into.k_end, other.k_end),
                   std::min(into.d_lo, other.d_lo),       std::max(into.d_hi, other.d_hi)};
  if (area(hull) != area(into) + area(other)) return false;
  into = hull;
  return true;
}

CastTable cast_table(std::span<const Transfer> transfers, const Layout& layout, int32_t rank) {
  const std::vector<int64_t> offsets = chunk_offsets(layout);
  CastTable table;
  table.send_counts.resize(layout.cp_size);
  table.recv_counts.resize(layout.cp_size);
  int32_t last_dst = -1;
  for (const Transfer& t : transfers) {
    if (t.dst == rank) {
      table.recv_counts[t.src] += t.rows.size();
      table.recv_ranges.push_back(t.rows);
    }
    if (t.src != rank) continue;
    table.send_counts[t.dst] += t.rows.size();
    // A transfer never leaves its owner's run, so it is contiguous in the owner's local order.
    const int64_t chunk = t.rows.start / layout.chunk_size;
    const int64_t start = offsets[chunk] + t.rows.start - layout.chunk(chunk).start;
    const Range local{start, start + t.rows.size()};
    if (last_dst == t.dst && table.send_ranges.back().end == local.start) {
      table.send_ranges.back().end = local.end;
    } else {
      table.send_ranges.push_back(local);
    }
    last_dst = t.dst;
  }
  return table;
}

std::vector<Slice> local_slices(std::span<const Slice> slices, std::span<const Placed> queries,
                                std::span<const Placed> keys) {
  std::vector<Placed> sorted(keys.begin(), keys.end());
  std::ranges::sort(sorted, {}, [](const Placed& p) { return p.rows.start; });
  const std::span<const Placed> by_row(sorted);
  const auto first_after = [](std::span<const Placed> runs, int64_t row) {
    return std::ranges::upper_bound(runs, row, {}, [](const Placed& p) { return p.rows.end; });
  };

  std::vector<Slice> moved;
  std::vector<Placed> hits;
  for (const Slice& slice : slices) {
    for (auto q = first_after(queries, slice.q_start);
         q != queries.end() && q->rows.start < slice.q_end; ++q) {
      const Slice rows = cut(slice, q->rows, {slice.k_start, slice.k_end});
      if (rows.empty()) continue;
      // Key runs are taken in buffer order, so that fragments that touch in the buffer are
      // neighbours in the list.
      hits.clear();
      for (auto k = first_after(by_row, rows.k_start);
           k != by_row.end() && k->rows.start < rows.k_end; ++k) {
        hits.push_back(*k);
      }
      std::ranges::sort(hits, {}, [](const Placed& p) { return p.local; });
      const size_t first = moved.size();
      for (const Placed& k : hits) {
        const Slice part = cut(rows, {rows.q_start, rows.q_end}, k.rows);
        if (part.empty()) continue;
        const Slice local = shift(part, q->local - q->rows.start, k.local - k.rows.start);
        if (moved.size() == first || !try_join(moved.back(), local)) moved.push_back(local);
      }
    }
  }
  join_all(moved);
  return moved;
}

}  // namespace magi
