// The number of rows to transfer, kept up to date while chunks change ranks.
//
// The key axis is cut into elementary segments, inside which every row is owned by one chunk and
// read by the same chunks; only segments that a chunk other than the owner reads count. With P(s)
// the set of ranks that own or read segment s, exactly len(s) * (|P(s)| - 1) rows are transferred
// for it (the "connectivity - 1" metric of hypergraph partitioning). Summed over ranks instead,
// each rank counts the union of the segments that its chunks own or read, minus a constant.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "planner/reader_counts.h"
#include "planner/tile_costs.h"

namespace magi {

// Segments as indices 0..n-1 in key order; a chunk's segments are a few index ranges.
struct Segments {
  std::vector<int32_t> rows;  // [num_segments] length of each
  RangeLists of_chunk;        // [num_chunks] segments that a chunk owns or reads
};

Segments make_segments(const RangeLists& chunk_keys, int64_t chunk_size);

// The same segments for blocks of `parts` neighbouring chunks that move together.
Segments coarsen(const Segments& segments, int64_t parts);

class Traffic {
 public:
  // `segments` must outlive the object. No chunk has an owner yet.
  Traffic(const Segments& segments, int64_t cp_size);

  // Gives every chunk its owner, whatever they were before.
  void assign(std::span<const int32_t> chunk_ranks);

  // Number of transferred rows, summed over all ranks.
  int64_t total() const { return total_; }

  // Change of `total` if chunks `a` (on rank_a) and `b` (on rank_b) traded places.
  int64_t swap_delta(int32_t a, int32_t rank_a, int32_t b, int32_t rank_b) const;

  // Trades the chunks; `delta` is the result of `swap_delta`.
  void swap(int32_t a, int32_t rank_a, int32_t b, int32_t rank_b, int64_t delta);

  // Number of segments that `swap_delta` has looked at so far: a measure of work that needs no
  // clock.
  int64_t reads() const { return reads_; }

  // Number of counts that `swap` has changed so far: the other part of the work.
  int64_t writes() const { return writes_; }

 private:
  // How the rank's union changes if it loses `out` and gains `in`.
  int64_t exchange_delta(int32_t rank, int32_t out, int32_t in) const;
  // Rows of those segments that kCount chunks of the rank own or read; 0 or 1.
  template <int32_t kCount>
  int64_t rows_with(int32_t rank, Range segments) const;
  void add(int32_t rank, int32_t chunk, int32_t sign);

  const Segments* segments_;
  int64_t cp_size_;
  std::vector<int64_t> row_starts_;  // [num_segments + 1] rows before each segment
  ReaderCounts readers_;
  int64_t total_ = 0;
  mutable int64_t reads_ = 0;
  int64_t writes_ = 0;
};

}  // namespace magi
