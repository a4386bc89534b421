#include "planner/reader_counts.h"

#include <bit>

#include "planner/ceil_div.h"

namespace magi {
namespace {

// A table of up to 1 MiB stays in a core's cache. In a larger one, counts that are contiguous are
// faster to go through than pages, which lie anywhere.
constexpr int64_t kSmallTable = int64_t{1} << 18;  // counts
constexpr int64_t kFewReads = 8;                   // counts of the table for each read, or more
constexpr int32_t kShift = 6;                      // of pages that hold a part of a rank's counts
constexpr int64_t kBlock = int64_t{1} << 16;       // counts that are allocated at once, about

int32_t shift_of(int64_t cp_size, int64_t num_segments, int64_t num_reads) {
  const int64_t table = cp_size * num_segments;
  if (table > kSmallTable && table / kFewReads > num_reads) return kShift;
  return static_cast<int32_t>(std::bit_width(static_cast<uint64_t>(num_segments)));
}

}  // namespace

ReaderCounts::ReaderCounts(int64_t cp_size, int64_t num_segments, int64_t num_reads)
    : shift_(shift_of(cp_size, num_segments, num_reads)),
      pages_per_rank_(ceil_div(num_segments, int64_t{1} << shift_)),
      pages_(cp_size * pages_per_rank_) {}

void ReaderCounts::clear() {
  std::ranges::fill(pages_, Page{});
  spare_.clear();
  blocks_.clear();
}

int32_t* ReaderCounts::zeros() {
  if (spare_.empty()) {
    const int64_t size = int64_t{1} << shift_;
    const int64_t pages = std::max<int64_t>(1, kBlock / size);
    blocks_.push_back(std::make_unique<int32_t[]>(pages * size));
    for (int64_t i = pages; i-- > 0;) spare_.push_back(blocks_.back().get() + i * size);
  }
  int32_t* const counts = spare_.back();
  spare_.pop_back();
  return counts;
}

}  // namespace magi
