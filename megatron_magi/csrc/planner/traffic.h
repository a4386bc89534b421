// Rows that must travel, kept up to date while chunks change ranks.
//
// The key axis is cut into elementary segments, inside which every row is owned by one chunk and
// read by the same chunks; only segments read by another chunk than the owner count. With P(s) the
// set of ranks that own or read segment s, exactly len(s) * (|P(s)| - 1) rows travel for it (the
// "connectivity - 1" metric of hypergraph partitioning). Summed the other way round: every rank
// pays for the union of the segments its chunks own or read, minus a constant.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "planner/loads.h"

namespace magi {

// Segments as indices 0..n-1 in key order; a chunk's segments are a few index ranges.
struct Segments {
  std::vector<int32_t> rows;  // [num_segments] length of each
  RangeLists of_chunk;        // [num_chunks] segments a chunk owns or reads
};

Segments make_segments(const RangeLists& chunk_keys, int64_t chunk_size);

// The same segments for blocks of `parts` neighbouring chunks that move together.
Segments coarsen(const Segments& segments, int64_t parts);

class Traffic {
 public:
  Traffic(const Segments& segments, std::span<const int32_t> chunk_ranks, int64_t cp_size);

  // Rows that travel, all ranks together.
  int64_t total() const { return total_; }

  // Change of `total` if chunks `a` (on rank_a) and `b` (on rank_b) traded places.
  int64_t swap_delta(int32_t a, int32_t rank_a, int32_t b, int32_t rank_b) const;

  // Trades them; `delta` is what `swap_delta` said.
  void swap(int32_t a, int32_t rank_a, int32_t b, int32_t rank_b, int64_t delta);

  // Segments looked at by `swap_delta` so far: the work done, in a unit that no clock enters.
  int64_t reads() const { return reads_; }

  // Counts changed by `swap` so far: the other part of the work.
  int64_t writes() const { return writes_; }

 private:
  // How the rank's union changes when it gives `out` away and gets `in`.
  int64_t exchange_delta(int32_t rank, int32_t out, int32_t in) const;
  void add(int32_t rank, int32_t chunk, int32_t sign);

  const Segments* segments_;
  int64_t num_segments_;
  std::vector<int32_t> readers_;  // [cp_size * num_segments] chunks of the rank in the segment
  int64_t total_ = 0;
  mutable int64_t reads_ = 0;
  int64_t writes_ = 0;
};

}  // namespace magi
