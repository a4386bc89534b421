// A slice is a rectangle of (query, key) cells cut by a diagonal band:
//
//   cell (q, k) is visible  <=>  q_start <= q < q_end,  k_start <= k < k_end,  d_lo <= k - q <=
//   d_hi
//
// Canonical form: the rectangle is the bounding box of the visible cells (every row and every key
// has at least one), and the band is clipped to the diagonals of the rectangle. Two slices with the
// same cells then have the same six numbers, and shifting them cannot overflow int32.
// Everything below computes in int64, so that "infinite" bands (INT32_MIN, INT32_MAX) are safe.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>

namespace magi {

struct Range {
  int64_t start = 0;
  int64_t end = 0;  // exclusive

  int64_t size() const { return end - start; }
  bool empty() const { return end <= start; }
  friend bool operator==(const Range&, const Range&) = default;
};

struct Slice {
  int64_t q_start = 0;
  int64_t q_end = 0;
  int64_t k_start = 0;
  int64_t k_end = 0;
  int64_t d_lo = 0;
  int64_t d_hi = 0;

  bool empty() const { return q_end <= q_start || k_end <= k_start || d_hi < d_lo; }
  friend bool operator==(const Slice&, const Slice&) = default;
};

// Keys that row `q` of a slice sees; empty if it sees none.
Range row_keys(const Slice& slice, int64_t q);

// The canonical slice with the same visible cells; `empty()` if there are none.
Slice tighten(const Slice& slice);

// Number of visible cells, in closed form. Exact up to 2^31 queries times 2^31 keys.
int64_t area(const Slice& slice);

// The cells of `slice` inside the rectangle, canonical.
Slice cut(const Slice& slice, Range q, Range k);

// The same cells moved by (q_shift, k_shift).
Slice shift(const Slice& slice, int64_t q_shift, int64_t k_shift);

// True if the two slices share a cell.
bool overlap(const Slice& a, const Slice& b);

// The first pair (i < j) that shares a cell, found by a sweep over the rows in O(n log n). At any
// row the key intervals of a legal mask are disjoint and keep their order, so only neighbours must
// be compared. `slices` must be canonical and not empty.
std::optional<std::pair<int64_t, int64_t>> find_overlap(std::span<const Slice> slices);

}  // namespace magi
