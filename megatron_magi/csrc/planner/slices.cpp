#include "planner/slices.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <numeric>
#include <set>
#include <vector>

namespace magi {
namespace {

// Pairs (i, j) of non-negative ints with i + j <= n, counted modulo 2^64: differences are exact.
uint64_t triangle(int64_t n) {
  if (n < 0) return 0;
  const uint64_t m = static_cast<uint64_t>(n) + 1;
  return m % 2 == 0 ? m / 2 * (m + 1) : (m + 1) / 2 * m;
}

// Number of cells of an h x w rectangle whose diagonal, counted from the lowest, is at most `t`.
uint64_t cells_up_to(int64_t h, int64_t w, int64_t t) {
  t = std::min(t, h + w - 2);
  return triangle(t) - triangle(t - h) - triangle(t - w) + triangle(t - h - w);
}

}  // namespace

Range row_keys(const Slice& s, int64_t q) {
  if (q < s.q_start || q >= s.q_end) return {};
  const Range keys{std::max(s.k_start, q + s.d_lo), std::min(s.k_end, q + s.d_hi + 1)};
  return keys.empty() ? Range{} : keys;
}

Slice tighten(const Slice& s) {
  if (s.empty()) return {};
  Slice t = s;
  t.q_start = std::max(s.q_start, s.k_start - s.d_hi);
  t.q_end = std::min(s.q_end, s.k_end - s.d_lo);
  t.k_start = std::max(s.k_start, t.q_start + s.d_lo);
  t.k_end = std::min(s.k_end, t.q_end + s.d_hi);
  t.d_lo = std::max(s.d_lo, t.k_start - (t.q_end - 1));
  t.d_hi = std::min(s.d_hi, t.k_end - 1 - t.q_start);
  return t.empty() ? Slice{} : t;
}

int64_t area(const Slice& s) {
  if (s.empty()) return 0;
  const int64_t h = s.q_end - s.q_start;
  const int64_t w = s.k_end - s.k_start;
  const int64_t lowest = s.k_start - (s.q_end - 1);
  return static_cast<int64_t>(cells_up_to(h, w, s.d_hi - lowest) -
                              cells_up_to(h, w, s.d_lo - 1 - lowest));
}

Slice cut(const Slice& s, Range q, Range k) {
  return tighten({std::max(s.q_start, q.start), std::min(s.q_end, q.end),
                  std::max(s.k_start, k.start), std::min(s.k_end, k.end), s.d_lo, s.d_hi});
}

Slice shift(const Slice& s, int64_t q_shift, int64_t k_shift) {
  const int64_t d_shift = k_shift - q_shift;
  return {s.q_start + q_shift, s.q_end + q_shift, s.k_start + k_shift,
          s.k_end + k_shift,   s.d_lo + d_shift,  s.d_hi + d_shift};
}

bool overlap(const Slice& a, const Slice& b) {
  Slice both = a;
  both.d_lo = std::max(a.d_lo, b.d_lo);
  both.d_hi = std::min(a.d_hi, b.d_hi);
  return !cut(both, {b.q_start, b.q_end}, {b.k_start, b.k_end}).empty();
}

std::optional<std::pair<int64_t, int64_t>> find_overlap(std::span<const Slice> slices) {
  int64_t row = 0;  // the sweep line; the set's order is that of first visible keys on this row
  const auto first_key = [&](int64_t i) { return row_keys(slices[i], row).start; };
  const auto before = [&](int64_t i, int64_t j) {
    const int64_t ki = first_key(i), kj = first_key(j);
    return ki != kj ? ki < kj : i < j;
  };
  std::set<int64_t, decltype(before)> active(before);
  std::vector<std::set<int64_t, decltype(before)>::iterator> place(slices.size(), active.end());

  const int64_t n = static_cast<int64_t>(slices.size());
  std::vector<int64_t> starts(n), ends(n);
  std::iota(starts.begin(), starts.end(), 0);
  std::iota(ends.begin(), ends.end(), 0);
  std::ranges::stable_sort(starts, {}, [&](int64_t i) { return slices[i].q_start; });
  std::ranges::stable_sort(ends, {}, [&](int64_t i) { return slices[i].q_end; });

  std::optional<std::pair<int64_t, int64_t>> found;
  const auto clash = [&](int64_t i, int64_t j) {
    if (overlap(slices[i], slices[j])) found = {std::min(i, j), std::max(i, j)};
    return found.has_value();
  };
  int64_t closed = 0;
  const auto close_until = [&](int64_t end) {
    for (; closed < n && slices[ends[closed]].q_end <= end; ++closed) {
      const auto next = active.erase(place[ends[closed]]);  // its neighbours are now adjacent
      if (next != active.begin() && next != active.end() && clash(*std::prev(next), *next)) {
        return true;
      }
    }
    return false;
  };
  for (const int64_t opened : starts) {
    if (close_until(slices[opened].q_start)) return found;
    row = slices[opened].q_start;
    const auto here = active.insert(opened).first;
    place[opened] = here;
    if (here != active.begin() && clash(*std::prev(here), opened)) return found;
    if (std::next(here) != active.end() && clash(opened, *std::next(here))) return found;
  }
  close_until(std::numeric_limits<int64_t>::max());
  return found;
}

}  // namespace magi
