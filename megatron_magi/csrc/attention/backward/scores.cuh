// Parts of the consumer warpgroups: products, masks, and the stores of dK and dV.
#pragma once
#include "../device/lanes.h"
#include "../device/wgmma.h"
#include "split_tiles.cuh"

namespace magi {

// Reads what the loader wrote with ordinary stores: lane 0 arrives for its warp and broadcasts.
MAGI_DEVICE int4 load_by_lane0(uint32_t addr) {
  int4 x{};
  if (ptx::thread_again() % 32 == 0) ptx::load_shared_volatile_16(addr, x);
  return x;
}

// Columns [16 k, 16 k + 16) of a tile of keys or of queries, from the tile's descriptor.
template <class Traits>
MAGI_DEVICE uint64_t key_columns(uint64_t tile, int k) {
  constexpr int kSteps = Traits::kKeyPanelCols / 16;  // of a panel
  return ptx::descriptor_plus(tile, k % kSteps * 32 + k / kSteps * Traits::kKeyPanelBytes);
}
template <class Traits>
MAGI_DEVICE uint64_t query_columns(uint64_t tile, int k) {
  constexpr int kSteps = Traits::kQueryPanelCols / 16;
  return ptx::descriptor_plus(tile, k % kSteps * 32 + k / kSteps * Traits::kQueryPanelBytes);
}

// D = A B over kWidth columns, both K-major (A from a 128-row tile, B from a 64-row tile), plus a
// stat of every query: `weights` x `stats` is a product over 16 columns of which three hold the
// parts of the stat (see split_stat).
template <class Traits, int kWidth>
MAGI_DEVICE void gemm_over_columns(float (&acc)[32], uint64_t a, uint64_t b, uint64_t weights,
                                   uint64_t stats) {
  using T = Traits;
  using Wgmma = ptx::Wgmma<T::kTileQ, typename T::Element>;
  Wgmma::template ss_first<0, 0>(acc, weights, stats);
#pragma unroll
  for (int k = 0; k < kWidth / 16; ++k)
    Wgmma::template ss<0, 0>(acc, key_columns<T>(a, k), query_columns<T>(b, k), 1);
}

// Likewise, without a stat.
template <class Traits, int kWidth>
MAGI_DEVICE void gemm_over_columns(float (&acc)[32], uint64_t a, uint64_t b) {
  using T = Traits;
  using Wgmma = ptx::Wgmma<T::kTileQ, typename T::Element>;
  Wgmma::template ss_first<0, 0>(acc, a, b);
#pragma unroll
  for (int k = 1; k < kWidth / 16; ++k)
    Wgmma::template ss<0, 0>(acc, key_columns<T>(a, k), query_columns<T>(b, k), 1);
}

// D += A B over query rows [16 kBegin, 16 kEnd): A in registers, B an MN-major query tile.
template <class Traits, int kBegin = 0, int kEnd = Traits::kTileQ / 16, int kCount>
MAGI_DEVICE void gemm_over_queries(float (&acc)[kCount], const uint32_t (&a)[Traits::kTileQ / 4],
                                   uint64_t b) {
  using T = Traits;
#pragma unroll
  for (int k = kBegin; k < kEnd; ++k)
    ptx::Wgmma<2 * kCount, typename T::Element>::template rs<1>(
        acc, a + 4 * k, ptx::descriptor_plus(b, k * 32 * T::kQueryPanelCols), 1);
}

// D = A B over the 128 keys, both MN-major.
template <class Traits, int kCount>
MAGI_DEVICE void gemm_over_keys(float (&acc)[kCount], uint64_t a, uint64_t b) {
  using T = Traits;
  using Wgmma = ptx::Wgmma<2 * kCount, typename T::Element>;
  Wgmma::template ss_first<1, 1>(acc, a, b);
#pragma unroll
  for (int k = 1; k < T::kTileK / 16; ++k)
    Wgmma::template ss<1, 1>(acc, ptx::descriptor_plus(a, k * 2048),
                             ptx::descriptor_plus(b, k * 2048), 1);
}

// Cells of a row that lie left of query `c`, of the 16 which a thread holds: queries
// 8 j + col + {0, 1}, j < 8.
MAGI_DEVICE int cells_before(int c, int col) {
  const int x = min(max(c - col, 0), 64);
  return x / 8 * 2 + min(x % 8, 2);
}

// The visible cells of this thread, where `limits` are the first four numbers of BwdStepMeta: bit
// 16 u + 2 j + e is key row + 8 u and query 8 j + col + e. A key sees one interval of the queries.
MAGI_DEVICE uint32_t visible_cells(int4 limits, int d_hi, int wg) {
  const Band band{0, limits.x, limits.y, limits.z, limits.w, d_hi};
  const int thread = ptx::thread_again();
  const int row = 64 * wg + thread % 128 / 32 * 16 + thread % 32 / 4, col = thread % 4 * 2;
  uint32_t bits = 0;
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int r = row + 8 * u;
    const Interval seen = band.rows_of(r);
    const uint32_t left = (1u << cells_before(seen.end, col)) - 1;
    bits |= (left & (~0u << cells_before(seen.begin, col))) << 16 * u;
  }
  return bits;
}

// Register i of a score fragment is cell 16 * ((i >> 1) & 1) + 2 * (i >> 2) + (i & 1).
MAGI_DEVICE void mask_scores(float (&p)[32], uint32_t visible) {
#pragma unroll
  for (int i = 0; i < 32; ++i)
    p[i] = visible & 1u << (16 * (i >> 1 & 1) + 2 * (i >> 2) + (i & 1)) ? p[i] : 0.f;
}

// Softcap: -lse * log2(e) of this thread's queries, 2 j + e that of query 8 j + col + e. Read
// before the scores are multiplied, because loads wait behind products.
MAGI_DEVICE void load_shifts(float (&shift)[16], uint32_t stats) {
  const uint32_t first = stats + ptx::thread_again() % 4 * 32;
#pragma unroll
  for (int i = 0; i < 16; i += 4) {
    const uint4 x = ptx::load_shared_16(first + i * 64);
    shift[i] = __uint_as_float(x.x), shift[i + 1] = __uint_as_float(x.y);
    shift[i + 2] = __uint_as_float(x.z), shift[i + 3] = __uint_as_float(x.w);
  }
  __syncwarp();  // lane 0 releases the stats for its warp
}

// Softcap: whether the polynomial may cap the scores of this step. No logit of a row is above its
// lse, so none of them need be asked. Logits below the polynomial's range come out too low, but
// their probabilities are negligible next to those of the row's other keys.
MAGI_DEVICE bool are_moderate(const BwdArgs& args, const float (&shift)[16]) {
  float least = shift[0], most = shift[0];
#pragma unroll
  for (int i = 1; i < 16; ++i) least = fminf(least, shift[i]), most = fmaxf(most, shift[i]);
  return __all_sync(0xffffffff, -least <= args.most_moderate && -most >= args.least_moderate);
}

// Softcap: P in 16 bits, and in place of the scores what turns dP into dS, P * (1 - tanh^2).
template <class Element, class Tanh>
MAGI_DEVICE void capped_probabilities(const BwdArgs& args, const float (&shift)[16], float (&s)[32],
                                      uint32_t (&p)[16], const Tanh& tanh_of) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float prob[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float capped = tanh_of(s[2 * i + e]);
      prob[e] = ptx::exp2_approx(fmaf(capped, args.cap_log2, shift[i / 2 * 2 + e]));
      // At least 0, also of a polynomial far beyond its range.
      s[2 * i + e] = prob[e] * __saturatef(fmaf(-capped, capped, 1.f));
    }
    p[i] = ptx::pack2<Element>(prob[0], prob[1]);
  }
}
template <class Element>
MAGI_DEVICE void capped_probabilities(const BwdArgs& args, const float (&shift)[16], float (&s)[32],
                                      uint32_t (&p)[16]) {
  capped_probabilities<Element>(
      args, shift, s, p, [&](float score) { return ptx::tanh_approx(score * args.cap_scale); });
}

// dS of a warpgroup's 64 keys to rows of a tile, from `first_row` on; `offset`, of the tile from
// `base`, is added last.
MAGI_DEVICE void store_ds_rows(const uint32_t (&ds)[16], uint32_t base, int first_row,
                               uint32_t offset = 0) {
  const int thread = ptx::thread_again();
  const uint32_t row = base + (first_row + thread % 128 / 32 * 16 + thread % 16) * 128;
  const uint32_t swizzle = ((thread % 32 / 16) ^ (thread % 8)) << 4;
#pragma unroll
  for (int j = 0; j < 4; ++j)
    ptx::stmatrix_x4(row + offset + (swizzle ^ (j * 32)), ds[4 * j], ds[4 * j + 1], ds[4 * j + 2],
                     ds[4 * j + 3]);
}

// mask_scores for pairs of 16-bit values.
MAGI_DEVICE void mask_packed(uint32_t (&p)[16], uint32_t visible) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int cell = 16 * (i & 1) + 2 * (i >> 1);
    p[i] &= (visible & 1u << cell ? 0xffffu : 0u) | (visible & 2u << cell ? 0xffff0000u : 0u);
  }
}

// P of a step, and what turns dP into dS: P too, or with softcap another number.
template <bool kSoftcap>
struct BwdProbs {
  uint32_t p[16];
  MAGI_DEVICE uint32_t (&slopes())[16] { return p; }
};
template <>
struct BwdProbs<true> {
  uint32_t p[16], own_slopes[16];
  MAGI_DEVICE uint32_t (&slopes())[16] { return own_slopes; }
};

// What dQ is multiplied by before it is added.
template <class Traits>
MAGI_DEVICE float dq_scale(const BwdArgs& args) {
  return Traits::kScalesP ? 1.f : args.softmax_scale;
}

// State shared by the consumers.
template <class Traits>
struct BwdConsumer {
  using T = Traits;
  using Probs = BwdProbs<T::kSoftcap>;

  const BwdArgs& args;
  int wg;
  uint32_t smem;

  MAGI_DEVICE uint32_t bar(int offset) const { return smem + T::kOffBars + offset; }
  MAGI_DEVICE void arrive(int offset) const {
    if (ptx::thread_again() % 32 == 0) ptx::mbar_arrive(bar(offset));
  }
  // dQ is in its staging tile.
  MAGI_DEVICE void finish_dq() const {
    ptx::fence_async_shared();
    __syncwarp();
    arrive(T::kBarDqFull + 8 * wg);
  }
  MAGI_DEVICE uint32_t q_tile(int n) const {
    return smem + T::kOffQ + n % T::kStages * T::kQueryBytes;
  }
  // Address of the step's BwdStepMeta.
  MAGI_DEVICE uint32_t meta(int n) const {
    return smem + T::kOffMeta + n % T::kMetaSlots * T::kMetaBytes;
  }
  MAGI_DEVICE uint32_t stat_tile(int kind, int n) const {
    return smem + T::kOffStats + (2 * (n % T::kStages) + kind) * T::kStatBytes;
  }
  MAGI_DEVICE uint64_t stats(int kind, int n) const {
    return ptx::plain_descriptor(stat_tile(kind, n), T::kStatHalf, 128);
  }
  MAGI_DEVICE uint64_t weights() const {
    return ptx::plain_descriptor(smem + T::kOffWeights, T::kStatHalf, 128);
  }
  MAGI_DEVICE void wait_for_q(int n) const {
    wait_for(bar(T::kBarQFull + 8 * (n % T::kStages)), n / T::kStages & 1);
  }

  // S of the keys at `keys`, less lse; with softcap, that is subtracted when S is capped.
  MAGI_DEVICE void multiply_scores(int n, uint32_t keys, float (&s)[32]) const {
    const uint64_t k = ptx::smem_descriptor(keys), q = ptx::smem_descriptor(q_tile(n));
    if constexpr (T::kSoftcap)
      gemm_over_columns<T, T::kHeadDim>(s, k, q);
    else
      gemm_over_columns<T, T::kHeadDim>(s, k, q, weights(), stats(0, n));
  }

  // Scores of keys [64 key_block, 64 key_block + 64) of the tile to probabilities in 16 bits;
  // `shift` is that of load_shifts.
  MAGI_DEVICE void to_probabilities(int n, int key_block, const float (&shift)[16], float (&s)[32],
                                    Probs& probs) const {
    const uint32_t meta = this->meta(n);
    const int4 by_lane0 = load_by_lane0(meta + offsetof(BwdStepMeta, d_hi));
    const int d_hi = from_lane0(by_lane0.x), partial = from_lane0(by_lane0.y);
    if constexpr (T::kSoftcap) {
      capped_probabilities<typename T::Element>(args, shift, s, probs.p);
    } else {
#pragma unroll
      for (int i = 0; i < 32; ++i) s[i] = ptx::exp2_approx(s[i] * args.scale_log2);
    }
    if (partial >> key_block & 1) {
      const uint32_t visible = visible_cells(from_lane0(load_by_lane0(meta)), d_hi, key_block);
      mask_scores(s, visible);
      if constexpr (T::kSoftcap) mask_packed(probs.p, visible);
    }
    uint32_t (&slopes)[16] = probs.slopes();
#pragma unroll
    for (int i = 0; i < 16; ++i)
      slopes[i] = ptx::pack2<typename T::Element>(s[2 * i], s[2 * i + 1]);
  }
};

// One gradient tile (64 keys of this warpgroup) to global memory; rows past `k_rows` are not
// written. 16-bit values go through `tile` (the panel-major tile of this warpgroup's operand).
template <class Traits, int kCount>
MAGI_DEVICE void store_gradient(const float (&acc)[kCount], uint32_t tile, void* base,
                                int64_t stride_token, bool is_fp32, int first_row, int k_rows,
                                float scale, int warp, int lane) {
  using T = Traits;
  if (is_fp32) {
    float* out = static_cast<float*>(base);
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int row = first_row + 16 * warp + lane / 4 + 8 * u;
      if (row >= k_rows) continue;
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
        const float2 value = {acc[4 * j + 2 * u] * scale, acc[4 * j + 2 * u + 1] * scale};
        *reinterpret_cast<float2*>(out + row * stride_token + 8 * j + 2 * (lane % 4)) = value;
      }
    }
    return;
  }
  // Each warp stages and stores its own 16 rows.
  constexpr int kSteps = T::kKeyPanelCols / 16;  // of a panel
#pragma unroll
  for (int j = 0; j < kCount / 8; ++j) {
    uint32_t r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      r[i] = ptx::pack2<typename T::Element>(acc[8 * j + 2 * i] * scale,
                                             acc[8 * j + 2 * i + 1] * scale);
    const uint32_t panel = tile + (j / kSteps) * T::kKeyPanelBytes;
    ptx::stmatrix_x4(panel + ptx::swizzle_offset(16 * warp + lane % 16, j % kSteps * 2 + lane / 16),
                     r[0], r[1], r[2], r[3]);
  }
  __syncwarp();
  constexpr int kChunks = kCount / 4;  // of 16 bytes, per row
  constexpr int kRowsAtOnce = 32 / kChunks;
  if (32 % kChunks != 0 && lane >= kRowsAtOnce * kChunks) return;
  const int chunk = lane % kChunks;
#pragma unroll
  for (int i = 0; i < 16 / kRowsAtOnce; ++i) {
    const int in_warp = i * kRowsAtOnce + lane / kChunks;
    const uint32_t src = tile + chunk / (2 * kSteps) * T::kKeyPanelBytes +
                         ptx::swizzle_offset(16 * warp + in_warp, chunk % (2 * kSteps));
    const uint4 value = ptx::load_shared_16(src);
    const int row = first_row + 16 * warp + in_warp;
    if (row < k_rows)
      *reinterpret_cast<uint4*>(static_cast<typename T::Element*>(base) + row * stride_token +
                                8 * chunk) = value;
  }
}

// dK and dV of this warpgroup's keys to global memory, when all steps are done: to the sums of the
// tile if another part follows.
template <class Traits>
MAGI_DEVICE void store_gradients(const BwdArgs& args, float (&dk)[Traits::kHeadDim / 2],
                                 float (&dv)[Traits::kValueDim / 2], int wg, uint32_t smem) {
  using T = Traits;
  // K and V are no longer read: their tiles stage the gradients.
  ptx::bar_sync(kBarEpilogue, 256);
  const int warp = ptx::thread_again() % 128 / 32, lane = ptx::thread_again() % 32,
            first_row = 64 * wg;
  const BwdBlock<T> block(args, ptx::load_shared_volatile(smem + T::kOffBlock));
  if (!take_turn(args, block, dv, dk)) return;
  const BwdKeyGradients& to = args.grads;
  const int grad_bytes = to.is_fp32 ? 4 : 2, tile_row = block.item.k_start;
  char* dk_base = static_cast<char*>(to.dk) +
                  (block.split * to.dk_split_stride + tile_row * to.dk_stride_token +
                   block.kv_head * to.dk_stride_head) *
                      grad_bytes;
  char* dv_base = static_cast<char*>(to.dv) +
                  (block.split * to.dv_split_stride + tile_row * to.dv_stride_token +
                   block.kv_head * to.dv_stride_head) *
                      grad_bytes;
  store_gradient<T>(dv, smem + T::kOffV + wg * 8192, dv_base, to.dv_stride_token, to.is_fp32,
                    first_row, block.item.k_rows, T::kScalesP ? 1.f / args.softmax_scale : 1.f,
                    warp, lane);
  store_gradient<T>(dk, smem + T::kOffK + wg * 8192, dk_base, to.dk_stride_token, to.is_fp32,
                    first_row, block.item.k_rows, T::kScalesP ? 1.f : args.softmax_scale, warp,
                    lane);
}

}  // namespace magi
