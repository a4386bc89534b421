#include "planner/transfers.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "planner/ceil_div.h"
#include "planner/dispatch.h"
#include "planner/loads.h"
#include "planner/remote_rows.h"

namespace magi {
namespace {

// Number of visible cells whose query and key are on the same rank: [cp_size].
std::vector<int64_t> own_areas(std::span<const Slice> slices, const Layout& layout) {
  std::vector<int64_t> areas(layout.cp_size);
  std::vector<std::vector<Placed>> runs;
  for (int32_t rank = 0; rank < layout.cp_size; ++rank) runs.push_back(local_runs(layout, rank));
  for (const Slice& slice : slices) {
    for (Range rows{slice.q_start, 0}; rows.start < slice.q_end; rows.start = rows.end) {
      const int32_t rank = layout.owner(rows.start);
      rows.end = layout.chunk(rows.start / layout.chunk_size).end;
      while (rows.end < slice.q_end && layout.owner(rows.end) == rank) {
        rows.end += layout.chunk_size;
      }
      const Slice part = cut(slice, rows, {slice.k_start, slice.k_end});
      auto keys = std::ranges::upper_bound(runs[rank], part.k_start, {},
                                           [](const Placed& p) { return p.rows.end; });
      for (; keys != runs[rank].end() && keys->rows.start < part.k_end; ++keys) {
        areas[rank] += area(cut(part, rows, keys->rows));
      }
    }
  }
  return areas;
}

}  // namespace

std::vector<int64_t> rows_on_link(std::span<const Transfer> transfers, int64_t cp_size,
                                  const StageCosts& costs, Nodes nodes) {
  if (nodes) {
    return busiest_link_rows(transfers, cp_size, nodes, costs.crossing_row_ps, costs.row_ps);
  }
  std::vector<int64_t> rows(cp_size);
  for (const Transfer& t : transfers) rows[t.dst] += t.rows.size();
  return rows;
}

std::vector<RankWork> rank_work(std::span<const Slice> slices, const Layout& layout,
                                std::span<const int64_t> loads, std::span<const int64_t> rows) {
  int64_t total_area = 0, total_tiles = 0;
  for (const Slice& slice : slices) total_area += area(slice);
  for (const int64_t load : loads) total_tiles += load;
  const std::vector<int64_t> own = own_areas(slices, layout);
  std::vector<RankWork> work(loads.size());
  for (size_t rank = 0; rank < work.size(); ++rank) {
    // Cells to tiles by the mask's average; the division is by area first, to stay in int64.
    const int64_t per_tile = std::max<int64_t>(1, total_area / std::max<int64_t>(1, total_tiles));
    work[rank].own_tiles = std::min(loads[rank], own[rank] / per_tile);
    work[rank].remote_tiles = loads[rank] - work[rank].own_tiles;
    const int32_t r = static_cast<int32_t>(rank);
    const std::vector<Range> waiting = remote_rows(slices, layout, r);
    const int64_t local = area_of_rows(slices, other_rows(waiting, layout, r));
    work[rank].local_tiles = std::min(loads[rank], local / per_tile);
    work[rank].remote_rows = rows[rank];
  }
  return work;
}

TransferPlan solve_transfers(const TransferProblem& problem) {
  const Layout& layout = problem.layout;
  const int64_t chunk_size = layout.chunk_size;
  TransferPlan plan;
  // 1. Loads.
  const int64_t parts = ceil_div(chunk_size, problem.tile_q);
  const std::vector<int64_t> tiles =
      tile_loads(problem.slices, chunk_size, layout.num_chunks(), problem.tile_q, problem.tile_k);
  plan.loads = rank_loads(sum_groups(tiles, parts), layout.chunk_ranks, layout.cp_size);
  // 2. Needs, each row once.
  const RangeLists keys = keys_by_block(problem.slices, chunk_size, layout.num_chunks());
  for (int32_t rank = 0; rank < layout.cp_size; ++rank) {
    const std::vector<Transfer> received = rank_transfers(keys, layout, rank);
    plan.transfers.insert(plan.transfers.end(), received.begin(), received.end());
  }
  // 3. Stages.
  const bool given = problem.degree && problem.forward;
  plan.staging = given ? Staging{*problem.degree, *problem.forward}
                       : choose_staging(rank_work(problem.slices, layout, plan.loads,
                                                  rows_on_link(plan.transfers, layout.cp_size,
                                                               problem.costs, problem.nodes)),
                                        problem.costs, problem.degree, problem.forward);
  if (plan.staging.degree == 0) return plan;
  std::vector<std::vector<Transfer>> stages(plan.staging.degree);
  // Ranks of one node are staged together, or each rank for itself.
  const auto receiver = [&](const Transfer& t) {
    return problem.nodes ? problem.nodes.node(t.dst) : t.dst;
  };
  for (auto first = plan.transfers.begin(); first != plan.transfers.end();) {
    const auto last = std::find_if(first, plan.transfers.end(), [&](const Transfer& t) {
      return receiver(t) != receiver(*first);
    });
    if (problem.nodes) {
      split_node_stages({first, last}, problem.tile_k, problem.nodes, stages);
    } else {
      split_stages({first, last}, problem.tile_k, stages);
    }
    first = last;
  }
  plan.transfers.clear();
  for (const std::vector<Transfer>& stage : stages) {
    plan.transfers.insert(plan.transfers.end(), stage.begin(), stage.end());
  }
  return plan;
}

std::vector<Transfer> shift_transfers(const Layout& layout, int64_t shift) {
  const int64_t total = layout.total_seqlen;
  std::vector<Transfer> transfers;
  if (total == 0) return transfers;
  const int64_t step = (shift % total + total) % total;
  for (Range rows{0, 0}; rows.start < total; rows.start = rows.end) {
    // Destination rows [start, end) within one chunk, whose sources do not wrap and lie in one.
    const int64_t from = (rows.start + step) % total;
    rows.end = std::min({layout.chunk(rows.start / layout.chunk_size).end, total,
                         rows.start + layout.chunk(from / layout.chunk_size).end - from,
                         rows.start + total - from});
    const int32_t dst = layout.owner(rows.start), src = layout.owner(from);
    if (dst != src) transfers.push_back({0, dst, src, {from, from + rows.size()}});
  }
  std::ranges::sort(transfers, {},
                    [](const Transfer& t) { return std::tuple(t.dst, t.src, t.rows.start); });
  return transfers;
}

}  // namespace magi
