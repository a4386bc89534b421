// The search for a layout on several nodes: chunks are first given to nodes, so that few rows cross
// between them, and then to the ranks of each node. Both steps are the same search
// (swap_search.h), with a node in the place of a rank in the first one.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/swap_search.h"

namespace magi {

// swap_search with ranks [n * ranks_per_node, (n + 1) * ranks_per_node) on node n. Of several
// attempts, the one with the fewest rows between nodes, among those whose loads are not worse than
// those of `start` or are within `max_load`; swap_search on all ranks is the last of them.
std::vector<int32_t> node_search(const SwapProblem& problem, int64_t ranks_per_node,
                                 std::vector<int32_t> start);

}  // namespace magi
