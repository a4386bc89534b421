// The records of the work lists: written by the host (csrc/schedule), copied to the device as they
// are, read by the kernels. All numbers are int32, so that numpy and PyTorch carry them as rows.
#pragma once
#include <cstdint>

#include "device/mask.h"

namespace magi {

// Forward: one query tile, tokens [q_start, q_start + num_tokens), with `num_entries` entries.
struct FwdTile {
  int32_t q_start = 0;
  int32_t num_tokens = 0;  // 1..tile_q
  int32_t entry_begin = 0;
  int32_t num_entries = 0;
  int32_t num_steps = 0;  // key tiles of all entries, at least 1
  int32_t out_start = 0;  // row of out and lse where q_start goes; q_start unless walks are split
  int32_t unused[2] = {0, 0};
};

// Forward: the key tiles of one slice for one query tile. Tile j covers keys
// [k_begin + j * tile_k, ... + tile_k); tiles in [full_begin, full_end) need no mask.
struct FwdEntry {
  int32_t k_begin = 0;
  int32_t num_tiles = 0;
  int32_t full_begin = 0;
  int32_t full_end = 0;
  Band band{};  // the slice, as far as this tile is concerned
  int32_t unused[2] = {0, 0};
};

// Keys of a tile of the backward. A block has the gradients of a tile in registers, and of heads
// wider than 192 there is room for half as many keys.
constexpr int bwd_tile_k(int head_dim) {
  return head_dim > 192 ? 64 : 128;
}
constexpr int kBwdTileQ = 64;  // query rows of a step

// Backward: one key tile with its entries, [entry_begin, entry_end) of the list; or a band of the
// query rows that see it.
struct alignas(16) BwdItem {
  int32_t k_start = 0;  // first key row of the tile
  int32_t k_rows = 0;   // 1..tile_k
  int32_t entry_begin = 0;
  int32_t entry_end = 0;
  int32_t steps = 0;  // query tiles of all entries, per head
  int32_t tile = 0;   // number of the key tile
  int32_t band = 0;   // of the tile's num_bands
  int32_t num_bands = 1;
};

// Backward: the rows [q_begin, q_end) that see something of a key tile through one slice, of which
// keys [k_lo, k_hi) belong to the slice, with d_lo <= k - q <= d_hi.
struct alignas(16) BwdEntry {
  int32_t q_begin = 0;
  int32_t q_end = 0;
  int32_t k_lo = 0;
  int32_t k_hi = 0;
  int32_t d_lo = 0;
  int32_t d_hi = 0;
  int32_t unused[2] = {0, 0};
};

// Backward, deterministic mode. Query rows are cut into segments, and those into row groups of
// kBwdTileQ rows, which are numbered through. An entry is known by its number plus one. A row group
// has been finished by an entry when its counter (one for every head) has the entry's number.

// The rows from q_begin up to the next segment.
struct BwdSegment {
  int32_t q_begin = 0;
  int32_t row_group = 0;  // of its first row
};

// Row groups of an entry, up to last_row_group and above those of the turn before, that must have
// been finished by the same entry before it; 0: by none.
struct BwdTurn {
  int32_t last_row_group = 0;
  int32_t after = 0;
};

// The segments and turns of an entry, by ascending rows; each has at least one of both.
struct alignas(16) BwdPlace {
  int32_t segment_begin = 0;
  int32_t segment_end = 0;
  int32_t turn_begin = 0;
  int32_t turn_end = 0;
};

static_assert(sizeof(FwdTile) == 32 && sizeof(FwdEntry) == 48 && sizeof(BwdItem) == 32 &&
                  sizeof(BwdEntry) == 32 && sizeof(BwdSegment) == 8 && sizeof(BwdTurn) == 8 &&
                  sizeof(BwdPlace) == 16,
              "the lists are arrays of int32 rows of 8, 12, 8, 8, 2, 2 and 4");

}  // namespace magi
