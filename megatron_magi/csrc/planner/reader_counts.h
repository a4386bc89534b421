// How many chunks of every rank own or read every segment.
//
// If documents are packed, a rank reads few of the segments of a long sequence. Its counts lie in
// pages of neighbouring segments, and a page without any reader takes no memory, so that the table
// grows with what is read instead of ranks times segments. Where pages would save nothing, because
// the table is small or chunks read most of it, a rank has one page.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "planner/slices.h"

namespace magi {

class ReaderCounts {
 public:
  // `num_reads` is the sum of all counts that will be there at a time.
  ReaderCounts(int64_t cp_size, int64_t num_segments, int64_t num_reads);

  // Sets all counts to 0.
  void clear();

  // Adds `sign`, 1 or -1, to the rank's counts of the segments. No count may fall below 0.
  void add(int32_t rank, Range segments, int32_t sign) {
    Page* pages = pages_.data() + rank * pages_per_rank_;
    for (Range piece = segments; piece.start < segments.end; piece.start = piece.end) {
      const int64_t first = piece.start >> shift_ << shift_;
      piece.end = std::min(segments.end, first + (int64_t{1} << shift_));
      Page& page = pages[piece.start >> shift_];
      if (page.counts == nullptr) page.counts = zeros();
      int32_t* const counts = page.counts + (piece.start - first);
      const int64_t size = piece.size();
      for (int64_t i = 0; i < size; ++i) counts[i] += sign;
      page.sum += sign * size;
      if (page.sum == 0) spare_.push_back(std::exchange(page.counts, nullptr));
    }
  }

  // Calls `f(piece, counts)` for consecutive pieces of the segments, in order. `counts[i]` is the
  // count of segment piece.start + i; `counts` is null if all counts of the piece are 0.
  template <typename F>
  void for_each_piece(int32_t rank, Range segments, F f) const {
    const Page* pages = pages_.data() + rank * pages_per_rank_;
    for (Range piece = segments; piece.start < segments.end; piece.start = piece.end) {
      const int64_t page = piece.start >> shift_;
      const int64_t first = page << shift_;
      piece.end = std::min(segments.end, first + (int64_t{1} << shift_));
      const int32_t* counts = pages[page].counts;
      f(piece, counts == nullptr ? nullptr : counts + (piece.start - first));
    }
  }

 private:
  struct Page {
    int32_t* counts = nullptr;  // null: all 0
    int64_t sum = 0;            // of the counts
  };

  int32_t* zeros();  // a page's counts, all 0

  int32_t shift_;  // a page has 2^shift_ segments
  int64_t pages_per_rank_;
  std::vector<Page> pages_;                         // [cp_size * pages_per_rank_]
  std::vector<int32_t*> spare_;                     // counts that are all 0, of no page
  std::vector<std::unique_ptr<int32_t[]>> blocks_;  // the memory of all counts
};

}  // namespace magi
