// Work list of the attention backward: which query tiles a key tile meets.
//
// One item is one key tile; a thread block runs one item for one group of query heads and keeps
// dK and dV of the tile in registers, so every key row belongs to exactly one item, also rows that
// no query sees. One entry is one slice of one item, cut to the tile's keys (or several slices of
// neighbouring rows that all see the same keys); its queries are walked in tiles of `tile_q` rows
// from `q_begin` on, so a document that starts anywhere wastes nothing.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/work_lists.h"
#include "planner/slices.h"

namespace magi {

struct BwdWorkList {
  std::vector<BwdItem> items;     // in launch order, see backward_order.h
  std::vector<BwdEntry> entries;  // grouped by item, by ascending rows
  // Walk the entries of an item, and the query tiles of an entry, from the last to the first:
  // chosen so that blocks that run together start at the same rows.
  bool descending = false;
  // Walk all heads of a query tile before the next tile. Good for a list by groups, whose blocks
  // then stay together, and in deterministic mode where all items share their first or last rows:
  // nobody then waits for the others once a head.
  bool heads_inner = false;
  // Items that share their first or last rows stand together, longest items first inside; otherwise
  // longest items first.
  bool grouped = false;
  // Rows of the groups, averaged over all steps: of groups whose items have work of different
  // length, and of the others.
  double uneven_rows = 0.;
  double even_rows = 0.;
  // Deterministic mode only: items add to dQ in the order of this list. Query rows are cut into
  // row groups of at most `tile_q` rows, so that nearly every step lies in one and every step in at
  // most two; a step signals its row groups when it has finished. One visit a step, in walk order.
  std::vector<BwdVisit> visits;
  int64_t num_row_groups = 0;
  int64_t steps = 0;          // sum over the items
  int64_t partial_steps = 0;  // of them, steps with at least one masked cell
};

struct BwdTiling {
  int64_t tile_k = 128;
  int64_t tile_q = 64;
};

// Throws std::invalid_argument for slices outside [0, num_q) x [0, num_k).
BwdWorkList build_bwd_work_list(std::span<const Slice> slices, int64_t num_q, int64_t num_k,
                                const BwdTiling& tiling, bool deterministic);

}  // namespace magi
