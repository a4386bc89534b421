// The owners of rows: equal chunks of the padded sequence, each on one rank, the same
// number on every rank. A rank's local order is its chunks in ascending order.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "planner/slices.h"

namespace magi {

struct Layout {
  int64_t total_seqlen = 0;              // real rows; rows from here to the end are padding
  int64_t chunk_size = 0;                // rows
  int64_t cp_size = 0;                   // ranks
  std::span<const int32_t> chunk_ranks;  // [num_chunks], owner of every chunk

  int64_t num_chunks() const { return static_cast<int64_t>(chunk_ranks.size()); }
  int64_t num_local_tokens() const { return num_chunks() / cp_size * chunk_size; }
  int32_t owner(int64_t row) const { return chunk_ranks[row / chunk_size]; }
  Range chunk(int64_t c) const { return {c * chunk_size, (c + 1) * chunk_size}; }
};

// A run of global rows that lies contiguously at `local` in some buffer.
struct Placed {
  Range rows;
  int64_t local = 0;
};

// Throws std::invalid_argument unless every rank owns the same number of chunks and the sequence
// fits into them.
void check(const Layout& layout);

// The rank's rows as ascending global runs (neighbouring chunks joined), with their local offsets.
std::vector<Placed> local_runs(const Layout& layout, int32_t rank);

// The parts of runs that lie in `ranges` (ascending), each at its previous local place.
std::vector<Placed> within(std::span<const Placed> runs, std::span<const Range> ranges);

// The offset of every chunk in its owner's local order: [num_chunks].
std::vector<int64_t> chunk_offsets(const Layout& layout);

}  // namespace magi
