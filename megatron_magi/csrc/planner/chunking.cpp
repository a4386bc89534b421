#include "planner/chunking.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "planner/ceil_div.h"
#include "planner/dispatch.h"
#include "planner/kind_balance.h"
#include "planner/node_search.h"
#include "planner/rebalance.h"
#include "planner/swap_search.h"
#include "planner/tile_costs.h"

namespace magi {
namespace {

struct Candidate {
  int64_t chunk_size = 0;
  std::vector<LayerKind> kinds;  // one for each mask
  std::vector<int64_t> loads;    // tiles per chunk, of all kinds
  std::vector<int32_t> ranks;    // by LPT, then trades for balance
  int64_t max_load = 0;          // tiles of the fullest rank of every kind
  int64_t cap = 0;               // what max_imbalance allows
};

int64_t load_cap(std::span<const int64_t> loads, const DispatchProblem& problem) {
  const int64_t total = std::accumulate(loads.begin(), loads.end(), int64_t{0});
  const int64_t per_rank = total / problem.cp_size;
  const int64_t rest = total % problem.cp_size;
  // floor(total * ppm / (1e6 * cp_size)) without leaving int64
  const int64_t kMillion = 1'000'000;
  return per_rank / kMillion * problem.max_imbalance_ppm +
         (per_rank % kMillion * problem.max_imbalance_ppm +
          rest * problem.max_imbalance_ppm / problem.cp_size) /
             kMillion;
}

// Tiles of all layers with each mask; as `tile_loads`.
std::vector<std::vector<int64_t>> tiles_of_masks(const DispatchProblem& problem, int64_t chunk_size,
                                                 int64_t num_chunks) {
  std::vector<std::vector<int64_t>> tiles;
  for (const LayerMask& mask : problem.masks) {
    tiles.push_back(
        tile_loads(mask.slices, chunk_size, num_chunks, problem.tile_q, problem.tile_k));
    for (int64_t& load : tiles.back()) load *= mask.num_layers;
  }
  return tiles;
}

// The slices of all masks: a row that any layer reads counts once.
std::vector<Slice> all_slices(std::span<const LayerMask> masks) {
  std::vector<Slice> all;
  for (const LayerMask& mask : masks) {
    all.insert(all.end(), mask.slices.begin(), mask.slices.end());
  }
  return all;
}

Candidate try_size(const DispatchProblem& problem, int64_t chunk_size,
                   std::span<const std::vector<int64_t>> tiles) {
  Candidate candidate;
  candidate.chunk_size = chunk_size;
  const int64_t parts = ceil_div(chunk_size, problem.tile_q);
  for (const std::vector<int64_t>& of_mask : tiles) {
    std::vector<int64_t> loads = sum_groups(of_mask, parts);
    candidate.loads.resize(loads.size());
    for (size_t c = 0; c < loads.size(); ++c) candidate.loads[c] += loads[c];
    const int64_t cap = load_cap(loads, problem);
    candidate.kinds.push_back({std::move(loads), cap});
  }
  candidate.ranks = dispatch_lpt(candidate.loads, problem.cp_size);
  const auto fullest = [&] {
    return std::ranges::max(rank_loads(candidate.loads, candidate.ranks, problem.cp_size));
  };
  candidate.cap = load_cap(candidate.loads, problem);
  candidate.max_load = fullest();
  // Trades can remove a few percent above the cap; if LPT ends far above it, chunks are too few.
  const bool near = candidate.max_load - candidate.cap <= candidate.cap / 10;
  if (problem.swap_trials != 0 && candidate.max_load > candidate.cap && near) {
    candidate.ranks =
        balance(candidate.loads, problem.cp_size, candidate.cap, std::move(candidate.ranks));
    candidate.max_load = fullest();
  }
  if (tiles.size() > 1) {
    Segments none;
    none.of_chunk.begin.resize(candidate.loads.size() + 1);
    candidate.ranks =
        balance_kinds(none, candidate.kinds, problem.cp_size, std::move(candidate.ranks));
    candidate.max_load = sum_of_fullest(candidate.kinds, candidate.ranks, problem.cp_size);
  }
  return candidate;
}

// The cost of a chunk size: the fullest rank's tiles, times a factor for the chunk borders and a
// surcharge if the load is above the cap.
int64_t cost(const Candidate& candidate) {
  const int64_t load = 1000 * candidate.max_load;
  const int64_t percent = candidate.max_load > candidate.cap ? 100 + kOverCapPercent : 100;
  return (load + load * kBorderRows / candidate.chunk_size) * percent;
}

Candidate best_candidate(const DispatchProblem& problem) {
  std::vector<int64_t> sizes = problem.chunk_size
                                   ? std::vector<int64_t>{*problem.chunk_size}
                                   : chunk_candidates(problem.num_local_tokens, problem.tile_q);
  const int64_t num_rows = problem.num_local_tokens * problem.cp_size;
  std::vector<std::vector<int64_t>> tiles;
  bool tiled = false;  // the chunks of `tiles` are whole tiles
  Candidate best;
  for (const int64_t size : sizes) {
    // Tiles are counted from the chunk's start: for multiples of tile_q they are the same tiles.
    const bool was_tiled = std::exchange(tiled, size % problem.tile_q == 0);
    if (!was_tiled || !tiled) {
      tiles = tiles_of_masks(problem, size, num_rows / size);
    }
    Candidate candidate = try_size(problem, size, tiles);
    if (best.chunk_size == 0 || cost(candidate) < cost(best)) best = std::move(candidate);
  }
  return best;
}

}  // namespace

std::vector<int64_t> chunk_candidates(int64_t num_local_tokens, int64_t tile_q) {
  std::vector<int64_t> all, tiled;
  int64_t finest_tiled = 0;  // chunks per rank
  for (int64_t per_rank = 1; per_rank <= std::min(kMaxChunksPerRank, num_local_tokens);
       ++per_rank) {
    if (num_local_tokens % per_rank != 0) continue;
    const int64_t size = num_local_tokens / per_rank;
    all.push_back(size);
    if (size % tile_q == 0) {
      tiled.push_back(size);
      finest_tiled = per_rank;
    }
  }
  return finest_tiled < kFewChunksPerRank ? all : tiled;
}

Dispatch solve_dispatch(const DispatchProblem& problem) {
  if (problem.chunk_size &&
      (*problem.chunk_size < 1 || problem.num_local_tokens % *problem.chunk_size != 0)) {
    throw std::invalid_argument("chunk_size must divide the tokens of a rank (" +
                                std::to_string(problem.num_local_tokens) + "), got " +
                                std::to_string(*problem.chunk_size));
  }
  if (problem.ranks_per_node < 0 ||
      (problem.ranks_per_node > 0 && problem.cp_size % problem.ranks_per_node != 0)) {
    throw std::invalid_argument("ranks_per_node must divide cp_size (" +
                                std::to_string(problem.cp_size) + "), got " +
                                std::to_string(problem.ranks_per_node));
  }
  Candidate best = best_candidate(problem);
  const int64_t num_chunks = static_cast<int64_t>(best.ranks.size());
  const int64_t trials =
      problem.swap_trials >= 0 ? problem.swap_trials : default_swap_trials(num_chunks);
  if (trials > 0 && problem.cp_size > 1) {
    const std::vector<Slice> slices = all_slices(problem.masks);
    const RangeLists keys = keys_by_block(slices, best.chunk_size, num_chunks);
    const Segments segments = make_segments(keys, best.chunk_size);
    const SwapProblem search{.segments = segments,
                             .chunk_loads = best.loads,
                             .cp_size = problem.cp_size,
                             .chunk_size = best.chunk_size,
                             .max_load = best.cap,
                             .trials = trials};
    best.ranks = problem.ranks_per_node > 0
                     ? node_search(search, problem.ranks_per_node, std::move(best.ranks))
                     : swap_search(search, std::move(best.ranks));
    if (best.kinds.size() > 1) {
      best.ranks = balance_kinds(segments, best.kinds, problem.cp_size, std::move(best.ranks));
    }
  }
  return {best.chunk_size, std::move(best.ranks)};
}

}  // namespace magi
