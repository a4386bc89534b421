#include "planner/nodes.h"

#include <algorithm>
#include <tuple>

namespace magi {
namespace {

// Appends a range, joined to the last one if `may_join` and both touch.
void put(std::vector<Range>& ranges, Range rows, bool may_join) {
  if (may_join && !ranges.empty() && ranges.back().end == rows.start) {
    ranges.back().end = rows.end;
  } else {
    ranges.push_back(rows);
  }
}

// The runs of a receive buffer by their global rows.
std::vector<Placed> places_of(std::span<const Range> buffer) {
  std::vector<Placed> placed;
  int64_t at = 0;
  for (const Range& rows : buffer) {
    placed.push_back({rows, at});
    at += rows.size();
  }
  std::ranges::sort(placed, {}, [](const Placed& p) { return p.rows.start; });
  return placed;
}

// `transfers` are those that cross and end in the rank's node; `arrived` is what the first step
// brings to the rank.
CastTable spreading_table(std::span<const Transfer> transfers, std::span<const Range> arrived,
                          const Layout& layout, Nodes nodes, int32_t rank) {
  const std::vector<Placed> placed = places_of(arrived);
  CastTable table;
  table.send_counts.resize(layout.cp_size);
  table.recv_counts.resize(layout.cp_size);
  std::vector<Transfer> received;
  int32_t last_dst = -1;
  for (const Transfer& t : transfers) {
    const int32_t relay = nodes.relay(t.src, rank);
    if (relay == t.dst) continue;  // a relay reads its own buffer
    if (t.dst == rank) {
      table.recv_counts[relay] += t.rows.size();
      received.push_back(t);
    }
    if (relay != rank) continue;
    table.send_counts[t.dst] += t.rows.size();
    const auto behind = std::ranges::upper_bound(placed, t.rows.start, {},
                                                 [](const Placed& p) { return p.rows.start; });
    const Placed& run = *std::prev(behind);
    const int64_t at = run.local + t.rows.start - run.rows.start;
    put(table.send_ranges, {at, at + t.rows.size()}, last_dst == t.dst);
    last_dst = t.dst;
  }
  // Peers are relays; each sends by source, then row, which is the order of the transfers.
  std::ranges::stable_sort(received, {},
                           [&](const Transfer& t) { return nodes.relay(t.src, rank); });
  for (const Transfer& t : received) table.recv_ranges.push_back(t.rows);
  return table;
}

// Cuts one rank's transfers where the pieces that cover them change stage; both are ordered by
// (src, row).
void cut_at_pieces(std::span<const Transfer> transfers, std::span<const Transfer> pieces,
                   std::span<std::vector<Transfer>> stages) {
  const auto place = [](const Transfer& t) { return std::pair(t.src, t.rows.end); };
  for (const Transfer& t : transfers) {
    auto piece = std::ranges::upper_bound(pieces, std::pair(t.src, t.rows.start), {}, place);
    for (Range rest = t.rows; !rest.empty(); rest.start = piece++->rows.end) {
      Transfer part = t;
      part.stage = piece->stage;
      part.rows = {rest.start, std::min(rest.end, piece->rows.end)};
      stages[part.stage - 1].push_back(part);
    }
  }
}

struct LinkRows {
  int64_t in = 0;
  int64_t out = 0;
  int64_t crossing_in = 0;
  int64_t crossing_out = 0;
};

}  // namespace

std::vector<Transfer> crossing_leg(std::span<const Transfer> transfers, Nodes nodes) {
  std::vector<Transfer> legs;
  for (Transfer t : transfers) {
    if (!nodes.crosses(t)) continue;
    t.dst = nodes.relay(t.src, t.dst);
    legs.push_back(t);
  }
  std::ranges::sort(legs, {},
                    [](const Transfer& t) { return std::tuple(t.dst, t.src, t.rows.start); });
  size_t kept = 0;
  for (const Transfer& t : legs) {
    Transfer* last = kept == 0 ? nullptr : &legs[kept - 1];
    if (last && last->dst == t.dst && last->src == t.src && t.rows.start <= last->rows.end) {
      last->rows.end = std::max(last->rows.end, t.rows.end);
    } else {
      legs[kept++] = t;
    }
  }
  legs.resize(kept);
  return legs;
}

void split_node_stages(std::span<const Transfer> transfers, int64_t granule, Nodes nodes,
                       std::span<std::vector<Transfer>> stages) {
  const auto by_source = [](const Transfer& t) { return std::pair(t.src, t.rows.start); };
  // 1. What the node receives from others, each row once, in stages of nearly equal rows.
  std::vector<Transfer> united = crossing_leg(transfers, nodes);
  for (Transfer& t : united) t.dst = nodes.relay(0, t.dst);
  std::ranges::sort(united, {}, by_source);
  std::vector<std::vector<Transfer>> united_stages(stages.size());
  split_stages(united, granule, united_stages);
  std::vector<Transfer> pieces;
  for (const auto& stage : united_stages) pieces.insert(pieces.end(), stage.begin(), stage.end());
  std::ranges::sort(pieces, {}, by_source);
  // 2. Each rank's rows: those from other nodes in the stage of their piece, the others by rank.
  for (auto first = transfers.begin(); first != transfers.end();) {
    const auto last = std::find_if(first, transfers.end(),
                                   [&](const Transfer& t) { return t.dst != first->dst; });
    std::vector<Transfer> inside, arriving;
    for (const Transfer& t : std::span(first, last)) {
      (nodes.crosses(t) ? arriving : inside).push_back(t);
    }
    std::vector<std::vector<Transfer>> parts(stages.size());
    split_stages(inside, granule, parts);
    cut_at_pieces(arriving, pieces, parts);
    for (size_t i = 0; i < parts.size(); ++i) {
      std::ranges::sort(parts[i], {}, by_source);
      stages[i].insert(stages[i].end(), parts[i].begin(), parts[i].end());
    }
    first = last;
  }
}

NodeCastTable node_cast_table(std::span<const Transfer> transfers, const Layout& layout,
                              Nodes nodes, int32_t rank) {
  std::vector<Transfer> first = crossing_leg(transfers, nodes), arriving;
  for (const Transfer& t : transfers) {
    if (!nodes.crosses(t)) {
      first.push_back(t);
    } else if (nodes.node(t.dst) == nodes.node(rank)) {
      arriving.push_back(t);
    }
  }
  std::ranges::sort(first, {},
                    [](const Transfer& t) { return std::tuple(t.dst, t.src, t.rows.start); });
  NodeCastTable table;
  table.first = cast_table(first, layout, rank);
  table.spreading = spreading_table(arriving, table.first.recv_ranges, layout, nodes, rank);
  return table;
}

std::vector<int64_t> busiest_link_rows(std::span<const Transfer> transfers, int64_t cp_size,
                                       Nodes nodes, int64_t crossing_ps, int64_t row_ps) {
  std::vector<LinkRows> links(cp_size);
  for (const Transfer& t : crossing_leg(transfers, nodes)) {
    links[t.src].crossing_out += t.rows.size();
    links[t.dst].crossing_in += t.rows.size();
  }
  for (const Transfer& t : transfers) {
    const int32_t src = nodes.crosses(t) ? nodes.relay(t.src, t.dst) : t.src;
    if (src == t.dst) continue;  // counted as crossing
    links[src].out += t.rows.size();
    links[t.dst].in += t.rows.size();
  }
  std::vector<int64_t> rows;
  for (const LinkRows& link : links) {
    const TimePs crossing = TimePs{std::max(link.crossing_in, link.crossing_out)} * crossing_ps;
    const TimePs as_inside = crossing / std::max<int64_t>(row_ps, 1);
    const TimePs most = std::max(TimePs{std::max(link.in, link.out)}, as_inside);
    rows.push_back(static_cast<int64_t>(std::min(most, TimePs{INT64_MAX})));
  }
  return rows;
}

}  // namespace magi
