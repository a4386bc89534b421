// Work list of the attention forward: which key tiles a query tile walks.
//
// The query axis is cut into strips where slices begin or end. The same slices cover every row of a
// strip, and tiles start at the strip's start, so no rows are wasted wherever a document starts. A
// short rest of a strip may be joined with rows of the next strips if that costs fewer steps. Every
// row lies in exactly one tile, or in `empty_rows` if no slice covers it. One entry is one slice of
// one tile: its keys, cut into tiles of `tile_k`, of which a contiguous run needs no mask.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/work_lists.h"
#include "planner/slices.h"
#include "schedule/forward_costs.h"

namespace magi {

struct FwdWorkList {
  std::vector<FwdTile> tiles;  // most steps first
  std::vector<FwdEntry> entries;
  std::vector<int32_t> empty_rows;  // pairs begin, end
  int64_t steps = 0;                // sum over the tiles
  int64_t masked_steps = 0;
  int64_t active_keys = 0;  // keys that some slice covers, which should stay in L2
  // 1, or the number of parts that the longest walk is split into. The output has num_parts * num_q
  // rows: each part is attention over some of the keys, and the caller merges them.
  int64_t num_parts = 1;
};

struct FwdTiling {
  int64_t tile_q = 128;  // tokens: rows / packed heads
  int64_t tile_k = 128;
};

// Throws std::invalid_argument for slices outside [0, num_q) x [0, num_k).
FwdWorkList build_fwd_work_list(std::span<const Slice> slices, int64_t num_q, int64_t num_k,
                                const FwdTiling& tiling, const FwdCosts& costs = kFwdCosts);

// For few tiles with very long walks: cuts every tile of more than `max_steps` key tiles into equal
// parts. `empty_rows` then holds the output rows that no part writes.
void split_long_walks(FwdWorkList& list, int64_t num_q, int64_t tile_k, int64_t max_steps);

}  // namespace magi
