// Work list of the attention backward: which query tiles a key tile meets.
//
// One item is one key tile. A thread block computes one item for one group of query heads and keeps
// dK and dV of the tile in registers, so every key row belongs to exactly one item, even if no
// query sees it; long lists are cut into bands of query rows (backward_bands.h). One entry is one
// slice of one item, cut to the tile's keys (or several slices of neighbouring rows that all see
// the same keys). Its queries are walked in tiles of `tile_q` rows from `q_begin` on, so no rows
// are wasted wherever a document starts.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/backward/visit.h"
#include "attention/work_lists.h"
#include "planner/slices.h"

namespace magi {

struct BwdWorkList {
  std::vector<BwdItem> items;     // in the order of a launch, see backward_order.h
  std::vector<BwdEntry> entries;  // grouped by item, by ascending rows
  // Whether the entries of an item, and the query tiles of an entry, are walked from the last to
  // the first. It is chosen so that blocks that run together start at the same rows.
  bool descending = false;
  // Whether all heads of a query tile are walked before the next tile. This keeps the blocks of a
  // grouped list together. In deterministic mode it helps if all items share their first or last
  // rows, because a block then does not wait for the others once per head.
  bool heads_inner = false;
  // Whether items that share their first or last rows stand together, longest items first in each
  // group; otherwise the longest items of the whole list come first. Only groups of different rows
  // (documents) are kept together.
  bool grouped = false;
  // Rows of a group, averaged over all steps: for groups whose items differ in length, and for the
  // others.
  double uneven_rows = 0.;
  double even_rows = 0.;
  // Scattered blocks only, whose groups share their rows: over how many rows items that start
  // together drift apart, because their lengths differ. 0 for other masks and in deterministic
  // mode, where blocks wait for each other.
  double scattered_rows = 0.;
  int64_t num_tiles = 0;  // key tiles, of which each is one item, or several bands of query rows
  // First rows of the slices.
  std::vector<int64_t> row_starts;
  // Deterministic mode only: items add to dQ in the order of this list. Query rows are cut into
  // row groups of at most 64 rows, so that nearly every step lies in one row group and every step
  // in at most two. See attention/work_lists.h and backward_turns.h.
  std::vector<BwdSegment> segments;
  std::vector<BwdPlace> places;
  std::vector<BwdTurn> turns;
  int64_t num_row_groups = 0;
  int64_t steps = 0;          // sum over the items
  int64_t partial_steps = 0;  // those of them with at least one masked cell
};

struct BwdTiling {
  int64_t tile_k = bwd_tile_k(128);
  int64_t tile_q = kBwdTileQ;
};

// The lengths of a launch.
struct BwdLengths {
  int64_t num_q = 0;
  int64_t num_k = 0;
};

// The list but for its turns (backward_turns.h). Throws std::invalid_argument for slices outside
// [0, num_q) x [0, num_k), and in deterministic mode for tiles of another height than the kernel's.
BwdWorkList build_bwd_work_list(std::span<const Slice> slices, const BwdLengths& lengths,
                                const BwdTiling& tiling, bool deterministic);

}  // namespace magi
