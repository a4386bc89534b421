#include "planner/node_search.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>

#include "planner/dispatch.h"
#include "planner/rebalance.h"

namespace magi {
namespace {

// Shares of the allowed imbalance that nodes may use: a sixteenth or a quarter, so that their ranks
// keep the rest, or all, if chunks are too coarse for less.
constexpr int64_t kNodeShares[] = {16, 4, 1};

// With up to so many ranks, the search without nodes is quick enough to be tried too.
constexpr int64_t kFewRanks = 64;

// LPT, with trades that bring the fullest rank under the cap if LPT leaves it above.
std::vector<int32_t> balanced(std::span<const int64_t> loads, int64_t cp_size, int64_t cap) {
  std::vector<int32_t> ranks = dispatch_lpt(loads, cp_size);
  if (std::ranges::max(rank_loads(loads, ranks, cp_size)) <= cap) return ranks;
  return balance(loads, cp_size, cap, std::move(ranks));
}

// The segments that some of the chunks own or read.
Segments segments_of(const Segments& all, std::span<const int32_t> chunks) {
  std::vector<int32_t> place(all.rows.size() + 1);  // 1 where a segment is used, then its number
  for (const int32_t chunk : chunks) {
    for (const Range& range : all.of_chunk.of(chunk)) {
      std::fill(place.begin() + range.start, place.begin() + range.end, 1);
    }
  }
  Segments some;
  for (size_t s = 0; s < all.rows.size(); ++s) {
    if (place[s] != 0) some.rows.push_back(all.rows[s]);
  }
  std::exclusive_scan(place.begin(), place.end(), place.begin(), 0);
  some.of_chunk.begin.push_back(0);
  for (const int32_t chunk : chunks) {
    for (const Range& range : all.of_chunk.of(chunk)) {
      some.of_chunk.ranges.push_back({place[range.start], place[range.end]});
    }
    some.of_chunk.begin.push_back(static_cast<int64_t>(some.of_chunk.ranges.size()));
  }
  join_lists(some.of_chunk);  // ranges may touch where a segment between them was left out
  return some;
}

// Gives chunks to nodes, whose loads may exceed the mean by 1 / `share` of what those of ranks may.
std::vector<int32_t> chunks_to_nodes(const SwapProblem& problem, int64_t ranks_per_node,
                                     int64_t share) {
  SwapProblem nodes = problem;
  nodes.cp_size = problem.cp_size / ranks_per_node;
  const auto& loads = problem.chunk_loads;
  const int64_t mean = std::reduce(loads.begin(), loads.end()) / nodes.cp_size;
  const int64_t room = std::max<int64_t>(0, problem.max_load * ranks_per_node - mean);
  nodes.max_load = mean + room / share;
  return swap_search(nodes, balanced(loads, nodes.cp_size, nodes.max_load));
}

// Gives every node's chunks to its ranks.
std::vector<int32_t> nodes_to_ranks(const SwapProblem& problem, int64_t ranks_per_node,
                                    std::span<const int32_t> node_of) {
  const int64_t num_nodes = problem.cp_size / ranks_per_node;
  std::vector<int32_t> ranks(node_of.size());
  for (int32_t node = 0; node < num_nodes; ++node) {
    std::vector<int32_t> chunks;
    std::vector<int64_t> loads;
    for (int32_t c = 0; c < static_cast<int32_t>(node_of.size()); ++c) {
      if (node_of[c] != node) continue;
      chunks.push_back(c);
      loads.push_back(problem.chunk_loads[c]);
    }
    const Segments segments = segments_of(problem.segments, chunks);
    const std::vector<int32_t> inside =
        swap_search({.segments = segments,
                     .chunk_loads = loads,
                     .cp_size = ranks_per_node,
                     .chunk_size = problem.chunk_size,
                     .max_load = problem.max_load,
                     .trials = problem.trials / num_nodes},
                    balanced(loads, ranks_per_node, problem.max_load));
    for (size_t i = 0; i < chunks.size(); ++i) {
      ranks[chunks[i]] = node * static_cast<int32_t>(ranks_per_node) + inside[i];
    }
  }
  return ranks;
}

// Rows that cross between nodes, each once for a node.
int64_t rows_that_cross(const SwapProblem& problem, int64_t ranks_per_node,
                        std::vector<int32_t> ranks) {
  for (int32_t& rank : ranks) rank /= static_cast<int32_t>(ranks_per_node);
  Traffic traffic(problem.segments, problem.cp_size / ranks_per_node);
  traffic.assign(ranks);
  return traffic.total();
}

}  // namespace

std::vector<int32_t> node_search(const SwapProblem& problem, int64_t ranks_per_node,
                                 std::vector<int32_t> start) {
  const auto fullest = [&](std::span<const int32_t> of) {
    return std::ranges::max(rank_loads(problem.chunk_loads, of, problem.cp_size));
  };
  const int64_t most = std::max(problem.max_load, fullest(start));
  std::vector<int32_t> best;
  int64_t fewest = INT64_MAX;
  const auto consider = [&](std::vector<int32_t> ranks) {
    if (fullest(ranks) > most) {  // a few trades between nodes may be all that is missing
      ranks = balance(problem.chunk_loads, problem.cp_size, problem.max_load, std::move(ranks));
      if (fullest(ranks) > most) return;
    }
    const int64_t rows = rows_that_cross(problem, ranks_per_node, ranks);
    if (rows >= fewest) return;
    fewest = rows;
    best = std::move(ranks);
  };
  for (const int64_t share : kNodeShares) {
    const std::vector<int32_t> node_of = chunks_to_nodes(problem, ranks_per_node, share);
    consider(nodes_to_ranks(problem, ranks_per_node, node_of));
  }
  if (best.empty() || problem.cp_size <= kFewRanks) {
    consider(swap_search(problem, std::move(start)));
  }
  return best;
}

}  // namespace magi
