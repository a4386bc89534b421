#include "planner/traffic.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace magi {
namespace {

// Calls `f(start, end)` for the parts of `x` that no range of `y` covers.
template <typename F>
void subtract(std::span<const Range> x, std::span<const Range> y, F f) {
  size_t j = 0;
  for (const Range& range : x) {
    int64_t start = range.start;
    while (j < y.size() && y[j].end <= start) ++j;
    for (size_t i = j; i < y.size() && y[i].start < range.end; ++i) {
      if (y[i].start > start) f(start, y[i].start);
      start = std::max(start, y[i].end);
    }
    if (start < range.end) f(start, range.end);
  }
}

// Segments that chunks own or read, summed over the chunks.
int64_t num_reads(const Segments& segments) {
  int64_t sum = 0;
  for (const Range& range : segments.of_chunk.ranges) sum += range.size();
  return sum;
}

}  // namespace

Segments make_segments(const RangeLists& chunk_keys, int64_t chunk_size) {
  const int64_t num_chunks = static_cast<int64_t>(chunk_keys.begin.size()) - 1;
  // 1. Find the keys that a chunk reads outside itself: where such a range begins, ends or crosses
  //    a chunk border, the set of readers or the owner may change.
  std::vector<Range> remote;
  std::vector<int64_t> cuts;
  for (int64_t c = 0; c < num_chunks; ++c) {
    const Range own[] = {{c * chunk_size, (c + 1) * chunk_size}};
    subtract(chunk_keys.of(c), own, [&](int64_t start, int64_t end) {
      remote.push_back({start, end});
      cuts.push_back(start);
      cuts.push_back(end);
    });
  }
  for (int64_t c = 0; c <= num_chunks; ++c) cuts.push_back(c * chunk_size);
  std::ranges::sort(cuts);
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  const auto place = [&](int64_t row) {
    return std::ranges::lower_bound(cuts, row) - cuts.begin();
  };
  // 2. Number the pieces that at least one range covers.
  std::vector<int32_t> cover(cuts.size() + 1);
  for (const Range& range : remote) {
    ++cover[place(range.start)];
    --cover[place(range.end)];
  }
  Segments segments;
  std::vector<int64_t> index(cuts.size());  // of the first numbered piece at or after a cut
  int32_t readers = 0;
  for (size_t i = 0; i < cuts.size(); ++i) {
    index[i] = static_cast<int64_t>(segments.rows.size());
    readers += cover[i];
    if (readers > 0) segments.rows.push_back(static_cast<int32_t>(cuts[i + 1] - cuts[i]));
  }
  // 3. List each chunk's pieces: its own and those that it reads.
  segments.of_chunk.begin.push_back(0);
  for (int64_t c = 0; c < num_chunks; ++c) {
    auto& ranges = segments.of_chunk.ranges;
    const auto put = [&](Range keys) {
      const Range next{index[place(keys.start)], index[place(keys.end)]};
      if (next.empty()) return;
      const bool touches = static_cast<int64_t>(ranges.size()) > segments.of_chunk.begin[c] &&
                           ranges.back().end == next.start;
      if (touches) {
        ranges.back().end = next.end;
      } else {
        ranges.push_back(next);
      }
    };
    const Range own{c * chunk_size, (c + 1) * chunk_size};
    bool own_done = false;
    const auto put_own = [&] {
      if (!own_done) put(own);
      own_done = true;
    };
    subtract(chunk_keys.of(c), std::span(&own, 1), [&](int64_t start, int64_t end) {
      if (start >= own.end) put_own();
      put({start, end});
    });
    put_own();
    segments.of_chunk.begin.push_back(static_cast<int64_t>(ranges.size()));
  }
  return segments;
}

Segments coarsen(const Segments& segments, int64_t parts) {
  Segments coarse;
  coarse.rows = segments.rows;
  RangeLists& blocks = coarse.of_chunk;
  const int64_t num_chunks = static_cast<int64_t>(segments.of_chunk.begin.size()) - 1;
  for (int64_t c = 0; c <= num_chunks; c += parts) {
    blocks.begin.push_back(segments.of_chunk.begin[c]);
  }
  blocks.ranges = segments.of_chunk.ranges;
  join_lists(blocks);
  return coarse;
}

Traffic::Traffic(const Segments& segments, int64_t cp_size)
    : segments_(&segments),
      cp_size_(cp_size),
      row_starts_(segments.rows.size() + 1),
      readers_(cp_size, static_cast<int64_t>(segments.rows.size()), num_reads(segments)) {
  std::inclusive_scan(segments.rows.begin(), segments.rows.end(), row_starts_.begin() + 1,
                      std::plus<>{}, int64_t{0});
}

template <int32_t kCount>
int64_t Traffic::rows_with(int32_t rank, Range segments) const {
  int64_t total = 0;
  readers_.for_each_piece(rank, segments, [&](Range piece, const int32_t* counts) {
    if (counts == nullptr) {
      if (kCount == 0) total += row_starts_[piece.end] - row_starts_[piece.start];
      return;
    }
    const int32_t* rows = segments_->rows.data() + piece.start;
    const int64_t size = piece.size();
    int32_t sum = 0;
    for (int64_t i = 0; i < size; ++i) sum += counts[i] == kCount ? rows[i] : 0;
    total += sum;
  });
  reads_ += segments.size();
  return total;
}

void Traffic::assign(std::span<const int32_t> chunk_ranks) {
  readers_.clear();
  for (size_t c = 0; c < chunk_ranks.size(); ++c) {
    add(chunk_ranks[c], static_cast<int32_t>(c), 1);
  }
  total_ = -row_starts_.back();  // what a rank owns is not transferred
  const Range all{0, static_cast<int64_t>(segments_->rows.size())};
  for (int32_t rank = 0; rank < cp_size_; ++rank) {
    total_ += row_starts_.back() - rows_with<0>(rank, all);
  }
  reads_ = writes_ = 0;
}

void Traffic::add(int32_t rank, int32_t chunk, int32_t sign) {
  for (const Range& range : segments_->of_chunk.of(chunk)) {
    readers_.add(rank, range, sign);
    writes_ += range.size();
  }
}

int64_t Traffic::exchange_delta(int32_t rank, int32_t out, int32_t in) const {
  const auto given = segments_->of_chunk.of(out);
  const auto gained = segments_->of_chunk.of(in);
  int64_t delta = 0;
  subtract(gained, given,
           [&](int64_t start, int64_t end) { delta += rows_with<0>(rank, {start, end}); });
  subtract(given, gained,
           [&](int64_t start, int64_t end) { delta -= rows_with<1>(rank, {start, end}); });
  return delta;
}

int64_t Traffic::swap_delta(int32_t a, int32_t rank_a, int32_t b, int32_t rank_b) const {
  return exchange_delta(rank_a, a, b) + exchange_delta(rank_b, b, a);
}

void Traffic::swap(int32_t a, int32_t rank_a, int32_t b, int32_t rank_b, int64_t delta) {
  add(rank_a, a, -1);
  add(rank_b, b, -1);
  add(rank_a, b, 1);
  add(rank_b, a, 1);
  total_ += delta;
}

}  // namespace magi
