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

#include "planner/slices.h"

namespace magi {

// Both structs are copied to the device as they are (see attention/forward/traits.h).
struct FwdTileRow {
  int32_t q_start = 0;
  int32_t num_tokens = 0;  // 1..tile_q
  int32_t entry_begin = 0;
  int32_t num_entries = 0;
  int32_t num_steps = 0;  // key tiles of all entries, at least 1
  int32_t out_start = 0;  // output row of q_start: part * num_q + q_start
  int32_t reserved[2] = {0, 0};
};

struct FwdEntryRow {
  int32_t k_begin = 0;
  int32_t num_tiles = 0;
  int32_t full_begin = 0;  // tiles [full_begin, full_end) are visible to every row of the tile
  int32_t full_end = 0;
  int32_t q_start = 0;  // the slice, as far as this tile is concerned
  int32_t q_end = 0;
  int32_t k_start = 0;
  int32_t k_end = 0;
  int32_t d_lo = 0;
  int32_t d_hi = 0;
  int32_t reserved[2] = {0, 0};
};

struct FwdWorkList {
  std::vector<FwdTileRow> tiles;  // most steps first
  std::vector<FwdEntryRow> entries;
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
  double tile_cost = 0.5;     // of starting a tile and writing it out, in steps
  double masked_cost = 0.15;  // of a masked step over an unmasked one
};

// Throws std::invalid_argument for slices outside [0, num_q) x [0, num_k).
FwdWorkList build_fwd_work_list(std::span<const Slice> slices, int64_t num_q, int64_t num_k,
                                const FwdTiling& tiling);

// For few tiles with very long walks: cuts every tile of more than `max_steps` key tiles into equal
// parts. `empty_rows` then holds the output rows that no part writes.
void split_long_walks(FwdWorkList& list, int64_t num_q, int64_t tile_k, int64_t max_steps);

}  // namespace magi
