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

#include "planner/slices.h"

namespace magi {

// Both structs are copied to the device as they are (see attention/backward/args.h).
struct BwdItem {
  int32_t k_start = 0;      // first key row of the tile
  int32_t k_rows = 0;       // 1..tile_k
  int32_t entry_begin = 0;  // entries [entry_begin, entry_end) of the list
  int32_t entry_end = 0;
  int32_t steps = 0;        // query tiles of all entries, per head
  int32_t visit_begin = 0;  // first of its visits in `BwdWorkList::visits`
  int32_t reserved[2] = {0, 0};
};

struct BwdEntry {
  int32_t q_begin = 0;  // rows [q_begin, q_end) see something of the tile
  int32_t q_end = 0;
  int32_t k_lo = 0;  // keys [k_lo, k_hi) of the tile belong to the slice
  int32_t k_hi = 0;
  int32_t d_lo = 0;  // d_lo <= k - q <= d_hi
  int32_t d_hi = 0;
  int32_t reserved[2] = {0, 0};
};

struct BwdVisit {
  int32_t row_group = 0;       // of the step's first row
  int32_t num_row_groups = 0;  // 1 or 2: also the next one
  // Signals of the two row groups that the step waits for; 0 where an earlier step of the same
  // entry has waited already (steps of one entry share no row).
  int32_t wait[2] = {0, 0};
};

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
