#include "planner/transfers.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "planner/ceil_div.h"
#include "planner/dispatch.h"
#include "planner/remote_rows.h"
#include "planner/tile_costs.h"

namespace magi {
namespace {

// Calls `add(query rank, keys, cells)` for every run of query rows of one rank in a slice and every
// run of keys in it that `runs_of(query rank)` lists.
template <class RunsOf, class Add>
void for_each_meeting(std::span<const Slice> slices, const Layout& queries, const RunsOf& runs_of,
                      const Add& add) {
  for (const Slice& slice : slices) {
    for (Range rows{slice.q_start, 0}; rows.start < slice.q_end; rows.start = rows.end) {
      const int32_t rank = queries.owner(rows.start);
      rows.end = queries.chunk(rows.start / queries.chunk_size).end;
      while (rows.end < slice.q_end && queries.owner(rows.end) == rank) {
        rows.end += queries.chunk_size;
      }
      const Slice part = cut(slice, rows, {slice.k_start, slice.k_end});
      const std::span<const Placed> runs = runs_of(rank);
      auto keys = std::ranges::upper_bound(runs, part.k_start, {},
                                           [](const Placed& p) { return p.rows.end; });
      for (; keys != runs.end() && keys->rows.start < part.k_end; ++keys) {
        add(rank, keys->rows, area(cut(part, rows, keys->rows)));
      }
    }
  }
}

// Number of visible cells whose query and key are on the same rank: [cp_size].
std::vector<int64_t> own_areas(std::span<const Slice> slices, const Homes& homes) {
  std::vector<int64_t> areas(homes.keys.cp_size);
  std::vector<std::vector<Placed>> runs;
  for (int32_t rank = 0; rank < homes.keys.cp_size; ++rank) {
    runs.push_back(local_runs(homes.keys, rank));
  }
  for_each_meeting(
      slices, homes.queries, [&](int32_t rank) { return std::span<const Placed>(runs[rank]); },
      [&](int32_t rank, Range, int64_t cells) { areas[rank] += cells; });
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

std::vector<int64_t> pair_areas(std::span<const Slice> slices, const Homes& homes) {
  const int64_t size = homes.keys.cp_size;
  std::vector<int64_t> areas(size * size);
  std::vector<Placed> runs;  // of all ranks, neighbouring chunks of one rank joined
  for (int64_t c = 0; c < homes.keys.num_chunks(); ++c) {
    const Range chunk = homes.keys.chunk(c);
    if (c > 0 && homes.keys.chunk_ranks[c] == homes.keys.chunk_ranks[c - 1]) {
      runs.back().rows.end = chunk.end;
    } else {
      runs.push_back({chunk, 0});
    }
  }
  for_each_meeting(
      slices, homes.queries, [&](int32_t) { return std::span<const Placed>(runs); },
      [&](int32_t rank, Range keys, int64_t cells) {
        areas[rank * size + homes.keys.owner(keys.start)] += cells;
      });
  return areas;
}

std::vector<RankWork> rank_work(std::span<const Slice> slices, const Homes& homes,
                                std::span<const int64_t> loads, std::span<const int64_t> rows) {
  int64_t total_area = 0, total_tiles = 0;
  for (const Slice& slice : slices) total_area += area(slice);
  for (const int64_t load : loads) total_tiles += load;
  const std::vector<int64_t> own = own_areas(slices, homes);
  std::vector<RankWork> work(loads.size());
  for (size_t rank = 0; rank < work.size(); ++rank) {
    // Cells to tiles by the mask's average; the division is by area first, to stay in int64.
    const int64_t per_tile = std::max<int64_t>(1, total_area / std::max<int64_t>(1, total_tiles));
    work[rank].own_tiles = std::min(loads[rank], own[rank] / per_tile);
    work[rank].remote_tiles = loads[rank] - work[rank].own_tiles;
    const int32_t r = static_cast<int32_t>(rank);
    const std::vector<Range> waiting = remote_rows(slices, homes, r);
    const int64_t local = area_of_rows(slices, other_rows(waiting, homes.queries, r));
    work[rank].local_tiles = std::min(loads[rank], local / per_tile);
    work[rank].remote_rows = rows[rank];
  }
  return work;
}

TransferPlan solve_transfers(const TransferProblem& problem) {
  const Layout& layout = problem.homes.queries;
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
    std::vector<Transfer> received = rank_transfers(keys, problem.homes, rank);
    if (!problem.by_queries.empty()) {
      std::erase_if(received, [&](const Transfer& t) {
        return problem.by_queries[t.dst * layout.cp_size + t.src];
      });
    }
    plan.transfers.insert(plan.transfers.end(), received.begin(), received.end());
  }
  // 3. Stages.
  const bool given = problem.degree && problem.forward;
  plan.staging = given ? Staging{*problem.degree, *problem.forward}
                       : choose_staging(rank_work(problem.slices, problem.homes, plan.loads,
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
