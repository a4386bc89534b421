// The chunk size and the chunks' ranks: the part of a plan that fixes the token layout.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "planner/slices.h"

namespace magi {

// The mask of some layers of a model.
struct LayerMask {
  std::vector<Slice> slices;  // canonical
  int64_t num_layers = 1;
};

struct DispatchProblem {
  std::span<const LayerMask> masks;   // of one sequence; a chunk's load is summed over the layers
  int64_t num_local_tokens = 0;       // per rank, padding included
  int64_t cp_size = 0;                // ranks
  std::optional<int64_t> chunk_size;  // divides num_local_tokens; nullopt: choose
  int64_t tile_q = 0;
  int64_t tile_k = 0;
  int64_t max_imbalance_ppm = 0;  // highest load over the mean, in millionths
  int64_t swap_trials = 0;        // 0: LPT only; negative: grows with the number of chunks
  int64_t ranks_per_node = 0;     // divides cp_size; 0: links between nodes count as any others
};

struct Dispatch {
  int64_t chunk_size = 0;
  std::vector<int32_t> chunk_ranks;  // [num_local_tokens * cp_size / chunk_size]
};

// The most chunks per rank that are tried: planning time and fragments grow with their number.
inline constexpr int64_t kMaxChunksPerRank = 64;

// The cost of one more chunk border, in rows of kernel work. Measured on 4 x H200 with another
// kernel, the backward takes about 1 + 190 / chunk_size of its time at very large chunks. Our
// planner joins fragments that touch, so we count one q tile.
inline constexpr int64_t kBorderRows = 128;

// Surcharge on a chunk size that does not reach the load cap. It makes large chunks much smaller
// for the sake of balance, but hardly halves chunks of 512 rows.
inline constexpr int64_t kOverCapPercent = 20;

// With fewer chunks per rank, balance is often out of reach.
inline constexpr int64_t kFewChunksPerRank = 8;

// Chunk sizes worth trying, largest first: the divisors of `num_local_tokens` that are multiples of
// `tile_q`, or all divisors if those leave fewer than kFewChunksPerRank chunks per rank, with at
// most kMaxChunksPerRank chunks per rank.
std::vector<int64_t> chunk_candidates(int64_t num_local_tokens, int64_t tile_q);

// Throws std::invalid_argument for a chunk_size that does not divide num_local_tokens.
Dispatch solve_dispatch(const DispatchProblem& problem);

}  // namespace magi
