// dQ of a step on its way to global memory: fragments to a staging tile, from there by TMA
// reduce-add, by one thread for each half of the columns.
#pragma once
#include "tile_walk.cuh"

namespace magi {

// fp32 dQ fragments to the swizzled staging tile. Rows of odd number store column block j ^ 2
// where even rows store j: without it, rows 2i and 2i + 1 would meet in the same banks.
template <class Traits, int kCount>
MAGI_DEVICE void stage_dq_swizzled(const float (&dq)[kCount], uint32_t tile, int warp, int lane,
                                   float scale) {
  using T = Traits;
  const int row = 16 * warp + lane / 4;
  const bool odd = row & 1;
  const uint32_t base = tile + row * 128 + (lane & 1) * 8;
  const uint32_t swizzle = ((((lane & 3) >> 1) ^ (row & 7) ^ (odd << 2)) << 4);
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const uint32_t chunk = swizzle ^ ((j & 3) * 32);
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int own = 4 * j + 2 * u, other = 4 * (j ^ 2) + 2 * u;
      const float x = (odd ? dq[other] : dq[own]) * scale;
      const float y = (odd ? dq[other + 1] : dq[own + 1]) * scale;
      ptx::store_shared(base + (j >> 2) * T::kDqPanelBytes + u * 1024 + chunk, make_float2(x, y));
    }
  }
}

// The same to a staging tile of one panel that is not swizzled: rows of 192 bytes, one behind the
// other. Rows 4i + 2 and 4i + 3 store column block j ^ 1 where rows 4i and 4i + 1 store j, for the
// same reason.
template <class Traits, int kCount>
MAGI_DEVICE void stage_dq_rows(const float (&dq)[kCount], uint32_t tile, int warp, int lane,
                               float scale) {
  constexpr int kRowBytes = Traits::kDqPanelCols * 4;
  static_assert(kRowBytes % 128 == 64 && kCount % 8 == 0 && 2 * kCount == Traits::kDqPanelCols);
  const int row = 16 * warp + lane / 4;
  const bool swaps = row & 2;
  const uint32_t base = tile + row * kRowBytes + (lane & 3) * 8;
  const uint32_t even = base + (swaps ? 32 : 0), odd = base - (swaps ? 32 : 0);
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int own = 4 * j + 2 * u, other = 4 * (j ^ 1) + 2 * u;
      const float x = (swaps ? dq[other] : dq[own]) * scale;
      const float y = (swaps ? dq[other + 1] : dq[own + 1]) * scale;
      ptx::store_shared((j & 1 ? odd : even) + j * 32 + u * 8 * kRowBytes, make_float2(x, y));
    }
  }
}

// dQ fragments of a warpgroup's columns, or of some panels of them, to a staging tile.
template <class Traits, int kCount>
MAGI_DEVICE void stage_dq(const float (&dq)[kCount], uint32_t tile, int warp, int lane,
                          float scale) {
  if constexpr (Traits::kDqPanelCols == 32)
    stage_dq_swizzled<Traits>(dq, tile, warp, lane, scale);
  else
    stage_dq_rows<Traits>(dq, tile, warp, lane, scale);
}

// Begins to add a staging tile to dQ.
template <class Traits>
MAGI_DEVICE void add_dq_tile(int half, int part, int q, int head, uint32_t smem,
                             const CUtensorMap* map_dq) {
  using T = Traits;
  ptx::tma_reduce_add_4d(map_dq, smem + T::kOffDq + half * T::kDqBytes, 0, q,
                         T::kInPairs ? 0 : (half * T::kDqParts + part) * T::kDqPanels, head);
  ptx::bulk_commit();
}

// Adds the steps' dQ as they come. A turn is one staging tile: a step's dQ, or a part of its
// columns.
template <class Traits>
MAGI_DEVICE void bwd_reduce_dq(int num_steps, int half, uint32_t smem, const uint8_t* meta,
                               const CUtensorMap* map_dq) {
  using T = Traits;
  const uint32_t full = smem + T::kOffBars + T::kBarDqFull + 8 * half;
  const uint32_t empty = smem + T::kOffBars + T::kBarDqEmpty + 8 * half;
#pragma unroll 1
  for (int n = T::kInPairs ? half : 0, turn = 0; n < num_steps; ++turn) {
    const int part = turn % T::kDqParts;
    const bool is_last_part = part == T::kDqParts - 1;
    wait_for(full, turn & 1);
    const volatile BwdStepMeta& m =
        *reinterpret_cast<const BwdStepMeta*>(meta + n % T::kMetaSlots * T::kMetaBytes);
    const int q = m.q_tile, head = m.head;
    add_dq_tile<T>(half, part, q, head, smem, map_dq);
    ptx::bulk_wait_read<0>();
    ptx::mbar_arrive(empty);
    if (is_last_part) n += T::kInPairs ? 2 : 1;
  }
  ptx::bulk_wait<0>();
}

}  // namespace magi
