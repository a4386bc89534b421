#include "solver/swap_search.h"

#include <algorithm>
#include <utility>

#include "solver/dispatch.h"
#include "solver/rng.h"

namespace magi {

void swap_search(const Segments& segments, std::span<const int64_t> chunk_loads, int64_t cp_size,
                 int64_t max_load, int64_t trials, std::span<int32_t> chunk_ranks) {
  Traffic traffic(segments, chunk_ranks, cp_size);
  std::vector<int64_t> loads = rank_loads(chunk_loads, chunk_ranks, cp_size);
  const int64_t cap = std::max(max_load, std::ranges::max(loads));
  Rng rng(20261121);
  for (int64_t trial = 0; trial < trials; ++trial) {
    const int32_t a = static_cast<int32_t>(rng.below(chunk_ranks.size()));
    const int32_t b = static_cast<int32_t>(rng.below(chunk_ranks.size()));
    const int32_t rank_a = chunk_ranks[a], rank_b = chunk_ranks[b];
    if (rank_a == rank_b) continue;
    const int64_t moved = chunk_loads[a] - chunk_loads[b];  // from rank_a to rank_b
    if (loads[rank_a] - moved > cap || loads[rank_b] + moved > cap) continue;
    const int64_t delta = traffic.swap_delta(a, rank_a, b, rank_b);
    if (delta > 0) continue;
    traffic.swap(a, rank_a, b, rank_b, delta);
    loads[rank_a] -= moved;
    loads[rank_b] += moved;
    std::swap(chunk_ranks[a], chunk_ranks[b]);
  }
}

}  // namespace magi
