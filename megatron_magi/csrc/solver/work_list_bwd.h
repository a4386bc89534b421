// Work list of the attention backward: which query tiles a key tile meets.
//
// One item is one key tile; a thread block runs one item for one group of query heads and keeps
// dK and dV of the tile in registers, so every key row belongs to exactly one item, also rows that
// no query sees. One entry is one slice of one item, cut to the tile's keys; its queries are walked
// in tiles of `tile_q` rows from `q_begin` on, so a document that starts anywhere wastes nothing.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "solver/slices.h"

namespace magi {

// Both structs are copied to the device as they are (see flex_attn/bwd/bwd_params.h).
struct BwdItem {
  int32_t k_start = 0;      // first key row of the tile
  int32_t k_rows = 0;       // 1..tile_k
  int32_t entry_begin = 0;  // entries [entry_begin, entry_end) of the list
  int32_t entry_end = 0;
  int32_t steps = 0;        // query tiles of all entries, per head
  int32_t visit_begin = 0;  // first of its records in `BwdWorkList::visits`
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
  int32_t cell = 0;       // of the step's first row
  int32_t num_cells = 0;  // 1 or 2: also the next one
  // Signals of the two cells that the step waits for; 0 where an earlier step of the same entry has
  // waited already (steps of one entry share no row).
  int32_t wait[2] = {0, 0};
};

struct BwdWorkList {
  std::vector<BwdItem> items;     // in launch order: most steps first
  std::vector<BwdEntry> entries;  // grouped by item, by ascending rows
  // Walk the entries of an item, and the query tiles of an entry, from the last to the first:
  // chosen so that blocks that run together start at the same rows (see `choose_walk`).
  bool descending = false;
  // Deterministic mode only: walk all heads of a query tile before the next tile. Good where all
  // items share their first or last rows: nobody then waits for the others once a head.
  bool heads_inner = false;
  // Deterministic mode only: items add to dQ in the order of this list. Query rows are cut into
  // cells of at most `tile_q` rows, so that nearly every step lies in one cell and every step in at
  // most two; a step signals its cells when it has finished. One record a step, in walk order.
  std::vector<BwdVisit> visits;
  int64_t num_cells = 0;
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

// How the blocks of a launch are made and ordered: sections of `heads_per_section` kv heads
// outermost, then items (longest first), then the heads of the section, then the splits.
struct BwdSchedule {
  int64_t num_splits = 1;         // blocks that share the query heads of one kv head
  int64_t heads_per_section = 1;  // divides the kv heads
  double makespan = 0.;           // of the busiest processor, in steps
};

// Few kv heads at a time keep Q, dO and dQ in the cache; many let long items of all heads start
// early, so that no long item is left at the end. Splits cost a pass over partial dK and dV.
// Simulates the launch on `num_sms` processors and takes the first choice that is within 2 % of
// the best. `head_bytes` is the size of Q, dO and dQ of one query head. In deterministic mode
// blocks of one kv head wait for each other, so enough heads are mixed that few of one run at a
// time.
BwdSchedule choose_bwd_schedule(const BwdWorkList& list, int64_t group, int64_t num_heads_kv,
                                int64_t num_sms, int64_t head_bytes, bool deterministic);

}  // namespace magi
