// Main kernel of the attention backward for sm_90a.
//
// A block owns one tile of 128 keys of one kv head (an item of the work list) and walks all query
// tiles of 64 rows that see it, for every query head of the group, so dK and dV stay in registers
// and are written once: no atomics, no zero fill, no conversion. dQ is added in fp32 to global
// memory by TMA.
//
// Warpgroup 0 gives its registers away: warp 0 loads, warps 1 and 2 add dQ. Warpgroups 1 and 2
// own 64 keys each. A step (one query tile of one head), with the 16-bit operands in smem unless
// marked (r) for registers:
//   1. S^T = K Q^T, dP^T = V dO^T                    m64n64, both started at once
//   2. P^T = exp2(S^T - lse), masked                 while dP^T runs
//   3. dV += P^T(r) dO                               m64nD
//   4. dS^T = P^T * (dP^T - delta), 16 bit, to smem; both warpgroups meet (kBarScores)
//   5. dQ = dS K, half of the columns per warpgroup  m64n(D/2)
//   6. dK += dS^T(r) Q                               while dQ goes to the staging tile
// dS is double buffered, so one meeting per step is enough: who passes meeting n + 1 knows that
// both have finished reading the dS of step n.
//
// Barriers            arrive                              wait
//   q_full, do_full   producer (expect) + TMA             consumers, before step 1
//   q_empty           8 consumer warps, after 6           producer
//   do_empty          8 consumer warps, after 3           producer
//   kv                producer + TMA, once                consumers
//   dq_full[w]        4 warps of warpgroup w, after 6     reduce warp w
//   dq_empty[w]       reduce warp w, smem was read        warpgroup w, before the staging store
// Phases follow one running step counter n: stage n % 2, parity (n / 2) & 1; dq: parity n & 1.
//
// Shared memory, D = 128: K 32, V 32, Q 2 x 16, dO 2 x 16, dS 2 x 16, dQ 32, rest 2 = 194 KiB.
// Registers of a consumer: dK 64, dV 64, S/dQ 32, dP 32, P 16, dS 16.
#pragma once
#include "bwd_traits.h"

namespace magi {

extern __shared__ uint8_t bwd_smem_raw[];

// Step count of the block and the walk over (head, entry, query tile) in the order that producer
// and consumers share. Only the producer walks; the others get BwdStepMeta.
template <class Traits>
struct BwdBlock {
  BwdItemView item;
  int kv_head;
  int split;
  int head_begin;
  int num_steps;

  MAGI_DEVICE BwdBlock(const BwdArgs& args, int block) {
    const int per_head = args.num_items * args.num_splits;
    kv_head = block / per_head;
    const int rest = block - kv_head * per_head;
    split = rest % args.num_splits;
    item = args.items[rest / args.num_splits];
    head_begin = (kv_head * args.num_splits + split) * args.heads_per_block;
    num_steps = item.steps * args.heads_per_block;
  }
};

// ---- warp 0 of the producer warpgroup, one thread

template <class Traits>
MAGI_DEVICE void bwd_produce(const BwdArgs& args, const BwdBlock<Traits>& block, uint32_t smem,
                             BwdStepMeta* meta, const BwdMaps& maps) {
  using T = Traits;
  const uint32_t bars = smem + T::kOffBars;
  const BwdItemView& item = block.item;
  ptx::mbar_arrive_expect_tx(bars + T::kBarKv, 2 * T::kKeyBytes);
  ptx::tma_load_4d(smem + T::kOffK, &maps.k, bars + T::kBarKv, 0, item.k_start, 0, block.kv_head,
                   ptx::kEvictFirst);
  ptx::tma_load_4d(smem + T::kOffV, &maps.v, bars + T::kBarKv, 0, item.k_start, 0, block.kv_head,
                   ptx::kEvictFirst);
  int n = 0;
  for (int head = block.head_begin; head < block.head_begin + args.heads_per_block; ++head) {
    int visit = item.visit_begin;
    for (int e = item.entry_begin; e < item.entry_end; ++e) {
      const BwdEntryView entry = args.entries[e];
      for (int q = entry.q_begin; q < entry.q_end; q += T::kTileQ, ++n, visit += 2) {
        const int stage = n % T::kStages;
        const uint32_t parity = (n / T::kStages + 1) & 1;
        const uint32_t q_full = bars + T::kBarQFull + 8 * stage;
        ptx::mbar_wait(bars + T::kBarQEmpty + 8 * stage, parity);
        const int shift = item.k_start - q;
        meta[stage] = {entry.q_end - q,     entry.k_lo - item.k_start, entry.k_hi - item.k_start,
                       entry.d_lo - shift, entry.d_hi - shift,        q,
                       head,               visit};
        ptx::mbar_arrive_expect_tx(q_full, T::kQueryBytes + T::kStatBytes);
        ptx::tma_load_4d(smem + T::kOffQ + stage * T::kQueryBytes, &maps.q, q_full, 0, q, 0, head,
                         ptx::kEvictNormal);
        ptx::tma_load_4d(smem + T::kOffStats + stage * T::kStatBytes, &maps.stats, q_full, q, head, 0,
                         0, ptx::kEvictNormal);
        const uint32_t do_full = bars + T::kBarDoFull + 8 * stage;
        ptx::mbar_wait(bars + T::kBarDoEmpty + 8 * stage, parity);
        ptx::mbar_arrive_expect_tx(do_full, T::kQueryBytes);
        ptx::tma_load_4d(smem + T::kOffDo + stage * T::kQueryBytes, &maps.dout, do_full, 0, q, 0, head,
                         ptx::kEvictNormal);
      }
    }
  }
}

// ---- warps 1 and 2 of the producer warpgroup, one thread each: dQ half `half` to global memory

MAGI_DEVICE int load_acquire(const int32_t* ptr) {
  int value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(ptr) : "memory");
  return value;
}
MAGI_DEVICE void add_release(int32_t* ptr, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(ptr), "r"(value) : "memory");
}

template <class Traits>
MAGI_DEVICE void bwd_reduce_dq(const BwdArgs& args, int num_steps, int half, uint32_t smem,
                               const volatile int4* dq_meta, const CUtensorMap* map_dq) {
  using T = Traits;
  const uint32_t full = smem + T::kOffBars + T::kBarDqFull + 8 * half;
  const uint32_t empty = smem + T::kOffBars + T::kBarDqEmpty + 8 * half;
  for (int n = 0; n < num_steps; ++n) {
    ptx::mbar_wait(full, n & 1);
    const int q = dq_meta[half].x, head = dq_meta[half].y, visit = dq_meta[half].z;
    int32_t* cell = nullptr;
    if constexpr (T::kDeterministic) {
      // Earlier visits of both cells the box touches must have finished.
      cell = args.semaphores + 1 +
             (static_cast<int64_t>(half) * args.num_heads_q + head) * args.num_cells +
             q / T::kTileQ;
      while (load_acquire(cell) < args.visits[visit]) {}
      while (load_acquire(cell + 1) < args.visits[visit + 1]) {}
      asm volatile("fence.proxy.async.global;" ::: "memory");
    }
    ptx::tma_reduce_add_4d(map_dq, smem + T::kOffDq + half * T::kDqBytes, 0, q, half * T::kDqPanels,
                           head);
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
    ptx::mbar_arrive(empty);
    if constexpr (T::kDeterministic) {
      ptx::bulk_wait<0>();
      asm volatile("fence.proxy.async.global;" ::: "memory");
      add_release(cell, 1);
      add_release(cell + 1, 1);
    }
  }
  ptx::bulk_wait<0>();
}

// ---- consumers

// D (+)= A B over kHeadDim, both K-major: A from a 128-row tile, B from a 64-row tile.
template <class Traits>
MAGI_DEVICE void gemm_over_head_dim(float (&acc)[Traits::kTileQ / 2], uint64_t a, uint64_t b) {
  using T = Traits;
#pragma unroll
  for (int k = 0; k < T::kHeadDim / 16; ++k) {
    const int in_panel = k % 4 * 32, panel = k / 4;
    ptx::Wgmma<T::kTileQ, typename T::Element>::template ss<0, 0>(
        acc, ptx::descriptor_plus(a, in_panel + panel * T::kKeyPanelBytes),
        ptx::descriptor_plus(b, in_panel + panel * T::kQueryPanelBytes), k != 0);
  }
}

// D += A B over the 64 query rows: A in registers, B an MN-major query tile.
template <class Traits>
MAGI_DEVICE void gemm_over_queries(float (&acc)[Traits::kHeadDim / 2],
                                   const uint32_t (&a)[Traits::kTileQ / 4], uint64_t b) {
  using T = Traits;
#pragma unroll
  for (int k = 0; k < T::kTileQ / 16; ++k)
    ptx::Wgmma<T::kHeadDim, typename T::Element>::template rs<1>(
        acc, a + 4 * k, ptx::descriptor_plus(b, k * 2048), 1);
}

// D = A B over the 128 keys, both MN-major.
template <class Traits>
MAGI_DEVICE void gemm_over_keys(float (&acc)[Traits::kDqCols / 2], uint64_t a, uint64_t b) {
  using T = Traits;
#pragma unroll
  for (int k = 0; k < T::kTileK / 16; ++k)
    ptx::Wgmma<T::kDqCols, typename T::Element>::template ss<1, 1>(
        acc, ptx::descriptor_plus(a, k * 2048), ptx::descriptor_plus(b, k * 2048), k != 0);
}

// Zero the masked cells of this thread. `row` is its first key row in the tile, `col` its first
// query row; register i holds (row + 8 * ((i >> 1) & 1), col + 8 * (i >> 2) + (i & 1)).
MAGI_DEVICE void mask_scores(float (&p)[32], const BwdStepMeta& m, int row, int col) {
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const int c = col + 8 * (j >> 1) + (j & 1);
    const int lo = max(m.r_lo, c + m.b_lo);
    const int hi = c < m.c_end ? min(m.r_hi, c + m.b_hi + 1) : 0;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int r = row + 8 * u;
      float& value = p[4 * (j >> 1) + 2 * u + (j & 1)];
      value = r >= lo && r < hi ? value : 0.f;
    }
  }
}

// fp32 dQ fragments to the swizzled staging tile. Rows of odd number store column block j ^ 2
// where even rows store j: without it, rows 2i and 2i + 1 would meet in the same banks.
template <class Traits>
MAGI_DEVICE void stage_dq(const float (&dq)[Traits::kDqCols / 2], uint32_t tile, int warp, int lane,
                          float scale) {
  using T = Traits;
  const int row = 16 * warp + lane / 4;
  const bool odd = row & 1;
  const uint32_t base = tile + row * 128 + (lane & 1) * 8;
  const uint32_t swizzle = ((((lane & 3) >> 1) ^ (row & 7) ^ (odd << 2)) << 4);
#pragma unroll
  for (int j = 0; j < T::kDqCols / 8; ++j) {
    const uint32_t chunk = swizzle ^ ((j & 3) * 32);
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int own = 4 * j + 2 * u, other = 4 * (j ^ 2) + 2 * u;
      float x = odd ? dq[other] : dq[own];
      float y = odd ? dq[other + 1] : dq[own + 1];
      if constexpr (!T::kScaleInScores) {
        x *= scale;
        y *= scale;
      }
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(base + (j >> 2) * T::kDqPanelBytes +
                                                            u * 1024 + chunk),
                   "f"(x), "f"(y)
                   : "memory");
    }
  }
}

// One gradient tile (64 keys of this warpgroup) to global memory; rows past `k_rows` are not
// written. 16-bit values go through `tile` (the panel-major tile of this warpgroup's operand).
template <class Traits>
MAGI_DEVICE void store_gradient(const float (&acc)[Traits::kHeadDim / 2], uint32_t tile, void* base,
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
      for (int j = 0; j < T::kHeadDim / 8; ++j) {
        const float2 value = {acc[4 * j + 2 * u] * scale, acc[4 * j + 2 * u + 1] * scale};
        *reinterpret_cast<float2*>(out + row * stride_token + 8 * j + 2 * (lane % 4)) = value;
      }
    }
    return;
  }
  // Each warp stages and stores its own 16 rows.
#pragma unroll
  for (int j = 0; j < T::kHeadDim / 16; ++j) {
    uint32_t r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      r[i] = ptx::pack2<typename T::Element>(acc[8 * j + 2 * i] * scale,
                                             acc[8 * j + 2 * i + 1] * scale);
    const uint32_t panel = tile + (j / 4) * T::kKeyPanelBytes;
    ptx::stmatrix_x4<false>(
        panel + ptx::swizzle_offset(16 * warp + lane % 16, j % 4 * 2 + lane / 16), r[0], r[1], r[2],
        r[3]);
  }
  __syncwarp();
  constexpr int kChunks = T::kHeadDim / 8;  // of 16 bytes, per row
  constexpr int kRowsAtOnce = 32 / kChunks;
  const int chunk = lane % kChunks;
#pragma unroll
  for (int i = 0; i < 16 / kRowsAtOnce; ++i) {
    const int in_warp = i * kRowsAtOnce + lane / kChunks;
    const uint32_t src = tile + (chunk / 8) * T::kKeyPanelBytes +
                         ptx::swizzle_offset(16 * warp + in_warp, chunk % 8);
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(src)
                 : "memory");
    const int row = first_row + 16 * warp + in_warp;
    if (row < k_rows)
      *reinterpret_cast<uint4*>(static_cast<typename T::Element*>(base) + row * stride_token +
                                8 * chunk) = value;
  }
}

template <class Traits>
MAGI_DEVICE void bwd_consume(const BwdArgs& args, const BwdBlock<Traits>& block, int wg,
                             uint32_t smem, const uint8_t* smem_ptr) {
  using T = Traits;
  using Element = typename T::Element;
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const uint32_t bars = smem + T::kOffBars;
  const uint64_t desc_k_rows = ptx::smem_descriptor(smem + T::kOffK + wg * 8192);
  const uint64_t desc_v_rows = ptx::smem_descriptor(smem + T::kOffV + wg * 8192);
  const uint64_t desc_q = ptx::smem_descriptor(smem + T::kOffQ);
  const uint64_t desc_do = ptx::smem_descriptor(smem + T::kOffDo);
  const uint64_t desc_q_mn = ptx::smem_descriptor(smem + T::kOffQ, T::kQueryPanelBytes);
  const uint64_t desc_do_mn = ptx::smem_descriptor(smem + T::kOffDo, T::kQueryPanelBytes);
  const uint64_t desc_ds = ptx::smem_descriptor(smem + T::kOffDs);
  // This warpgroup's columns of K: one panel (D = 128) or half of one (D = 64).
  const uint64_t desc_k_cols =
      ptx::smem_descriptor(smem + T::kOffK + wg * (T::kPanels == 2 ? T::kKeyPanelBytes : 64));
  const int first_row = 64 * wg;
  const int row = first_row + 16 * warp + lane / 4;  // of this thread's first fragment row
  const int col = 2 * (lane % 4);
  const uint32_t ds_store = smem + T::kOffDs + (first_row + 16 * warp + lane % 16) * 128;
  const uint32_t ds_swizzle = ((lane / 16) ^ (lane & 7)) << 4;
  const uint32_t dq_tile = smem + T::kOffDq + wg * T::kDqBytes;
  const float ds_scale = T::kScaleInScores ? args.softmax_scale : 1.f;

  float dk[T::kHeadDim / 2], dv[T::kHeadDim / 2];
#pragma unroll
  for (int i = 0; i < T::kHeadDim / 2; ++i) dk[i] = dv[i] = 0.f;

  if (block.num_steps > 0) ptx::mbar_wait(bars + T::kBarKv, 0);
#pragma unroll 1
  for (int n = 0; n < block.num_steps; ++n) {
    const int stage = n % T::kStages;
    const uint32_t parity = (n / T::kStages) & 1;
    const uint32_t stage_bytes = stage * T::kQueryBytes;
    const uint32_t ds_buffer = (n & 1) * T::kScoreBytes;
    float s[32], dp[32];

    // 1. both products of this step
    ptx::mbar_wait(bars + T::kBarQFull + 8 * stage, parity);
    ptx::wgmma_fence();
    gemm_over_head_dim<T>(s, desc_k_rows, ptx::descriptor_plus(desc_q, stage_bytes));
    ptx::wgmma_commit();
    ptx::mbar_wait(bars + T::kBarDoFull + 8 * stage, parity);
    ptx::wgmma_fence();
    gemm_over_head_dim<T>(dp, desc_v_rows, ptx::descriptor_plus(desc_do, stage_bytes));
    ptx::wgmma_commit();

    const BwdStepMeta m =
        *reinterpret_cast<const BwdStepMeta*>(smem_ptr + T::kOffMeta + stage * sizeof(BwdStepMeta));
    const float* stats =
        reinterpret_cast<const float*>(smem_ptr + T::kOffStats + stage * T::kStatBytes) + col;

    // 2. P^T; stats hold -lse * log2(e), which is -inf for rows that see nothing
    ptx::wgmma_wait<1>();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 lse = *reinterpret_cast<const float2*>(stats + 8 * j);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[4 * j + i] =
            ptx::exp2_approx(fmaf(s[4 * j + i], args.scale_log2, i & 1 ? lse.y : lse.x));
    }
    const bool full = m.c_end >= T::kTileQ && m.r_lo <= first_row && m.r_hi >= first_row + 64 &&
                      m.b_lo <= first_row - (T::kTileQ - 1) && m.b_hi >= first_row + 63;
    if (!full) mask_scores(s, m, row, col);
    uint32_t p[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) p[i] = ptx::pack2<Element>(s[2 * i], s[2 * i + 1]);

    // 4. dS^T (before 3 is started, so that one wait covers S and dP); stats hold -delta * ds_scale
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence();
    gemm_over_queries<T>(dv, p, ptx::descriptor_plus(desc_do_mn, stage_bytes));
    ptx::wgmma_commit();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 delta = *reinterpret_cast<const float2*>(stats + T::kTileQ + 8 * j);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        dp[4 * j + i] = s[4 * j + i] * fmaf(dp[4 * j + i], ds_scale, i & 1 ? delta.y : delta.x);
    }
    uint32_t ds[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) ds[i] = ptx::pack2<Element>(dp[2 * i], dp[2 * i + 1]);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      ptx::stmatrix_x4<false>(ds_store + ds_buffer + (ds_swizzle ^ (j * 32)), ds[4 * j],
                              ds[4 * j + 1], ds[4 * j + 2], ds[4 * j + 3]);
    ptx::fence_async_shared();
    ptx::bar_sync(kBarScores, 256);

    // 5. and 6.
    float dq[T::kDqCols / 2];
    ptx::wgmma_fence();
    gemm_over_keys<T>(dq, ptx::descriptor_plus(desc_ds, ds_buffer), desc_k_cols);
    ptx::wgmma_commit();
    gemm_over_queries<T>(dk, ds, ptx::descriptor_plus(desc_q_mn, stage_bytes));
    ptx::wgmma_commit();

    ptx::wgmma_wait<2>();  // dV
    if (lane == 0) ptx::mbar_arrive(bars + T::kBarDoEmpty + 8 * stage);
    ptx::wgmma_wait<1>();  // dQ
    ptx::mbar_wait(bars + T::kBarDqEmpty + 8 * wg, (n & 1) ^ 1);
    stage_dq<T>(dq, dq_tile, warp, lane, args.softmax_scale);
    if (warp == 0 && lane == 0)
      *reinterpret_cast<int4*>(const_cast<uint8_t*>(smem_ptr) + T::kOffDqMeta + 16 * wg) = {
          m.q_tile, m.head, m.visit, 0};
    ptx::fence_async_shared();
    __syncwarp();
    if (lane == 0) ptx::mbar_arrive(bars + T::kBarDqFull + 8 * wg);
    ptx::wgmma_wait<0>();  // dK
    if (lane == 0) ptx::mbar_arrive(bars + T::kBarQEmpty + 8 * stage);
  }

  // K and V are no longer read: their tiles stage the gradients.
  ptx::bar_sync(kBarEpilogue, 256);
  const float dk_scale = T::kScaleInScores ? 1.f : args.softmax_scale;
  const int grad_bytes = args.grad_is_fp32 ? 4 : 2;
  const BwdItemView& item = block.item;
  char* dk_base = static_cast<char*>(args.dk) +
                  (block.split * args.split_stride + item.k_start * args.dk_stride_token +
                   block.kv_head * args.dk_stride_head) *
                      grad_bytes;
  char* dv_base = static_cast<char*>(args.dv) +
                  (block.split * args.split_stride + item.k_start * args.dv_stride_token +
                   block.kv_head * args.dv_stride_head) *
                      grad_bytes;
  store_gradient<T>(dv, smem + T::kOffV + wg * 8192, dv_base, args.dv_stride_token,
                    args.grad_is_fp32, first_row, item.k_rows, 1.f, warp, lane);
  store_gradient<T>(dk, smem + T::kOffK + wg * 8192, dk_base, args.dk_stride_token,
                    args.grad_is_fp32, first_row, item.k_rows, dk_scale, warp, lane);
}

template <class Traits>
__global__ __launch_bounds__(Traits::kThreads, 1) void bwd_kernel(
    const __grid_constant__ BwdMaps maps, const __grid_constant__ BwdArgs args) {
  using T = Traits;
  const uint32_t raw = ptx::smem_addr(bwd_smem_raw);
  uint8_t* smem_ptr = bwd_smem_raw + ((1024 - (raw & 1023)) & 1023);
  const uint32_t smem = ptx::smem_addr(smem_ptr);
  const uint32_t bars = smem + T::kOffBars;
  int* block_slot = reinterpret_cast<int*>(smem_ptr + T::kOffBars + 8 * T::kNumBars);

  if (threadIdx.x == 0) {
    for (int i = 0; i < T::kStages; ++i) {
      ptx::mbar_init(bars + T::kBarQFull + 8 * i, 1);
      ptx::mbar_init(bars + T::kBarQEmpty + 8 * i, 8);
      ptx::mbar_init(bars + T::kBarDoFull + 8 * i, 1);
      ptx::mbar_init(bars + T::kBarDoEmpty + 8 * i, 8);
    }
    ptx::mbar_init(bars + T::kBarKv, 1);
    for (int half = 0; half < 2; ++half) {
      ptx::mbar_init(bars + T::kBarDqFull + 8 * half, 4);
      ptx::mbar_init(bars + T::kBarDqEmpty + 8 * half, 1);
    }
    ptx::mbar_init_fence();
    // A ticket makes sure that the blocks a block waits for have started.
    *block_slot = T::kDeterministic ? atomicAdd(args.semaphores, 1) : blockIdx.x;
  }
  __syncthreads();
  const BwdBlock<T> block(args, T::kDeterministic ? *block_slot : blockIdx.x);
  const int wg = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);

  if (wg == 0) {
    ptx::setmaxnreg_dec<T::kProducerRegs>();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    if (block.num_steps > 0 && threadIdx.x % 32 == 0) {
      if (warp == 0)
        bwd_produce<T>(args, block, smem, reinterpret_cast<BwdStepMeta*>(smem_ptr + T::kOffMeta),
                       maps);
      else if (warp <= 2)
        bwd_reduce_dq<T>(args, block.num_steps, warp - 1, smem,
                         reinterpret_cast<const int4*>(smem_ptr + T::kOffDqMeta), &maps.dq);
    }
  } else {
    ptx::setmaxnreg_inc<T::kConsumerRegs>();
    bwd_consume<T>(args, block, wg - 1, smem, smem_ptr);
  }
}

}  // namespace magi
