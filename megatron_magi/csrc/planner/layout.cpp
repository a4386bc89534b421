#include "planner/layout.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace magi {

void check(const Layout& layout) {
  if (layout.cp_size < 1 || layout.chunk_size < 1 || layout.total_seqlen < 0) {
    throw std::invalid_argument("cp_size and chunk_size must be >= 1 and total_seqlen >= 0, got " +
                                std::to_string(layout.cp_size) + ", " +
                                std::to_string(layout.chunk_size) + ", " +
                                std::to_string(layout.total_seqlen));
  }
  std::vector<int64_t> counts(layout.cp_size);
  for (const int32_t rank : layout.chunk_ranks) {
    if (rank < 0 || rank >= layout.cp_size) {
      throw std::invalid_argument(
          "chunk_ranks must lie in [0, cp_size = " + std::to_string(layout.cp_size) + "), got " +
          std::to_string(rank));
    }
    ++counts[rank];
  }
  for (const int64_t count : counts) {
    if (count != counts[0]) {
      throw std::invalid_argument("every rank must own the same number of chunks, got " +
                                  std::to_string(count) + " and " + std::to_string(counts[0]));
    }
  }
  if (layout.num_chunks() * layout.chunk_size < layout.total_seqlen) {
    throw std::invalid_argument(
        "chunks must cover total_seqlen = " + std::to_string(layout.total_seqlen) + " rows, got " +
        std::to_string(layout.num_chunks()) + " chunks of " + std::to_string(layout.chunk_size));
  }
}

std::vector<Placed> local_runs(const Layout& layout, int32_t rank) {
  std::vector<Placed> runs;
  int64_t local = 0;
  for (int64_t c = 0; c < layout.num_chunks(); ++c) {
    if (layout.chunk_ranks[c] != rank) continue;
    const Range chunk = layout.chunk(c);
    if (!runs.empty() && runs.back().rows.end == chunk.start) {
      runs.back().rows.end = chunk.end;
    } else {
      runs.push_back({chunk, local});
    }
    local += layout.chunk_size;
  }
  return runs;
}

std::vector<Placed> within(std::span<const Placed> runs, std::span<const Range> ranges) {
  std::vector<Placed> parts;
  auto range = ranges.begin();
  for (const Placed& run : runs) {
    while (range != ranges.end() && range->end <= run.rows.start) ++range;
    for (auto r = range; r != ranges.end() && r->start < run.rows.end; ++r) {
      const Range rows{std::max(r->start, run.rows.start), std::min(r->end, run.rows.end)};
      parts.push_back({rows, run.local + rows.start - run.rows.start});
    }
  }
  return parts;
}

std::vector<int64_t> chunk_offsets(const Layout& layout) {
  std::vector<int64_t> offsets(layout.chunk_ranks.size());
  std::vector<int64_t> filled(layout.cp_size);
  for (int64_t c = 0; c < layout.num_chunks(); ++c) {
    int64_t& at = filled[layout.chunk_ranks[c]];
    offsets[c] = at;
    at += layout.chunk_size;
  }
  return offsets;
}

}  // namespace magi
