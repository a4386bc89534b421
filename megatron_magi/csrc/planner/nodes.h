// Exchanges between nodes: a row crosses the link from its node to another node once and spreads
// inside that node. Rank r is rank r % ranks_per_node of node r / ranks_per_node.
//
// An exchange has two steps. In the first, a rank sends the ranks of its node what they read, and
// to each other node the union of the rows that its ranks read, once: to its relay there, the rank
// of the same number. In the second, relays spread these rows inside their nodes.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "planner/rank_view.h"
#include "planner/required_rows.h"
#include "planner/stages.h"

namespace magi {

struct Nodes {
  int64_t ranks_per_node = 0;  // 0: links between nodes are not told from links inside

  explicit operator bool() const { return ranks_per_node > 0; }
  int32_t node(int32_t rank) const { return rank / static_cast<int32_t>(ranks_per_node); }
  bool crosses(const Transfer& t) const { return node(t.src) != node(t.dst); }
  // The rank of node(dst) that receives what `src` sends there.
  int32_t relay(int32_t src, int32_t dst) const {
    const int32_t per_node = static_cast<int32_t>(ranks_per_node);
    return dst / per_node * per_node + src % per_node;
  }
};

// Transfers between nodes: from each source to its relays, each row once, ordered by (relay,
// src, row). `transfers` are of one stage, in any order.
std::vector<Transfer> crossing_leg(std::span<const Transfer> transfers, Nodes nodes);

// Both steps of one stage as one rank sees them.
struct NodeCastTable {
  CastTable first;
  CastTable spreading;  // send_ranges are rows of what `first` has brought
};

// `transfers` are those of one stage, ordered by (dst, src, row); those from the rank and to the
// rank's node are enough.
NodeCastTable node_cast_table(std::span<const Transfer> transfers, const Layout& layout,
                              Nodes nodes, int32_t rank);

// Splits the transfers to one node's ranks, ordered by (dst, src, row), into stages as split_stages
// does, and appends them in that order. A row from another node comes in the same stage for all
// ranks of the node, so that it crosses once.
void split_node_stages(std::span<const Transfer> transfers, int64_t granule, Nodes nodes,
                       std::span<std::vector<Transfer>> stages);

// Rows on each rank's link inside the node that take as long as the busiest of its links, in the
// direction that takes longer. `crossing_ps` and `row_ps`
// are the times of a row on the link between nodes and inside a node. [cp_size].
std::vector<int64_t> busiest_link_rows(std::span<const Transfer> transfers, int64_t cp_size,
                                       Nodes nodes, int64_t crossing_ps, int64_t row_ps);

}  // namespace magi
