// All ranks' transfers of a mask on a layout, in stages.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "planner/layout.h"
#include "planner/nodes.h"
#include "planner/required_rows.h"
#include "planner/stages.h"

namespace magi {

struct TransferProblem {
  std::span<const Slice> slices;  // canonical
  Homes homes;
  int64_t tile_q = 0;
  int64_t tile_k = 0;
  std::vector<bool> by_queries;    // [query rank * cp_size + key rank]: no keys go there; or empty
  std::optional<int64_t> degree;   // remote stages; nullopt: choose
  std::optional<Forward> forward;  // nullopt: choose
  StageCosts costs;                // for choosing
  Nodes nodes;                     // how ranks lie on nodes
};

struct TransferPlan {
  Staging staging;
  std::vector<int64_t> loads;       // tiles per rank: [cp_size]
  std::vector<Transfer> transfers;  // ordered by (stage, dst, src, row)
};

TransferPlan solve_transfers(const TransferProblem& problem);

// The rows that the model of times counts for every rank's exchanges: those that it receives, or on
// several nodes those of its busiest link. [cp_size].
std::vector<int64_t> rows_on_link(std::span<const Transfer> transfers, int64_t cp_size,
                                  const StageCosts& costs, Nodes nodes);

// The work of every rank, for the model of times in stages.h: [cp_size]. `loads` are tiles,
// `rows` are those of rows_on_link, both by rank.
std::vector<RankWork> rank_work(std::span<const Slice> slices, const Homes& homes,
                                std::span<const int64_t> loads, std::span<const int64_t> rows);

// Visible cells by the rank of the query and the rank of the key: [cp_size * cp_size], a query's
// rank by rows.
std::vector<int64_t> pair_areas(std::span<const Slice> slices, const Homes& homes);

// Transfers of a shift: the rank that owns position p < total_seqlen receives row
// (p + shift) mod total_seqlen. Ordered by (dst, src, row), stage 0.
std::vector<Transfer> shift_transfers(const Layout& layout, int64_t shift);

}  // namespace magi
