// Main kernel of the attention backward for sm_90a.
//
// A block owns one tile of 128 keys of one kv head (an item of the work list) and walks all query
// tiles of 64 rows that see it, for every query head of the group, so dK and dV stay in registers
// and are written once: no atomics, no zero fill, no conversion. dQ is added in fp32 to global
// memory by TMA.
//
// Warpgroup 0 gives its registers away: warp 0 loads tiles, warp 1 brings the stats, warps 2 and 3
// add dQ. Warpgroups 1 and 2 own 64 keys each. A step (one query tile of one head); operands are
// 16 bit and in shared memory unless marked (r) for registers:
//   1. S^T = K Q^T, dP^T = V dO^T           m64n64
//   2. P^T = exp2(S^T - lse), masked        while dP^T runs
//   3. dV += P^T(r) dO                      m64nD, in two parts around the store of dS
//   4. dS^T = P^T * (dP^T - delta)          16 bit, to shared memory; both warpgroups meet
//   5. dQ = dS K over all 128 keys          m64n(D/2): half of the columns per warpgroup
//   6. dK += dS^T(r) Q                      m64nD
// dS is double buffered, so one meeting per step is enough: who passes meeting n + 1 knows that
// both have finished reading the dS of step n.
//
// Two facts shape the order (docs/kernel_notes_bwd.md has the measurements):
// - Shared memory moves 128 bytes a clock, which m64n64 products of two shared operands use up
//   completely. Per step, D = 128, in clocks of shared memory: S, dP, dQ 1536, dV, dK 512, stats
//   270, dS 128, dQ staging 256 + 256, loads 256: 3200, where the tensor cores need 2560.
// - Loads and stores of shared memory stand in one queue, in order, with the products: what is
//   issued after a product waits until that has been handed to the tensor cores.
//
// Barriers (b = step % 2)  arrive                                     wait
//   q_full[b], count 2     warp 0 (expect) + TMA, warp 1 (stats)      consumers, before 1
//   do_full[b], 1          warp 0 (expect) + TMA                      consumers, before dP
//   q_empty[b], 8          consumer warps, after 6                    warps 0 and 1
//   do_empty[b], 8         consumer warps, after 3                    warp 0
//   kv, 1                  warp 0 (expect) + TMA, once                consumers
//   dq_full[w], 4          warpgroup w, dQ is in its staging tile     warp 2 + w
//   dq_empty[w], 1         warp 2 + w, the staging tile was read      warpgroup w, before that
// Phases follow the step counter n: (n / 2) & 1, for dq n & 1.
//
// Shared memory, D = 128: K 32, V 32, Q 2 x 16, dO 2 x 16, dS 2 x 16, dQ 32, rest 2 = 194 KiB.
// Registers of a consumer: dK 64, dV 64, S 32, dP (then dQ) 32, P 16, dS 16 of 232; nothing spills.
#pragma once
#ifdef MAGI_DEBUG_WATCHDOG
#include <cstdio>
#endif

#include "bwd_traits.h"

namespace magi {

extern __shared__ __align__(1024) uint8_t bwd_smem[];

// A debug build stops with an error instead of hanging.
MAGI_DEVICE void wait_for(uint32_t bar, uint32_t parity) {
#ifdef MAGI_DEBUG_WATCHDOG
  for (int tries = 0; !ptx::mbar_try_wait(bar, parity); ++tries)
    if (tries > 1000000) {
      printf("block %d thread %d waits at barrier %u, parity %u\n", blockIdx.x, threadIdx.x,
             bar % 256, parity);
      __trap();
    }
#else
  ptx::mbar_wait(bar, parity);
#endif
}

// Whether the phase has completed; never suspends the thread.
MAGI_DEVICE bool is_complete(uint32_t bar, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;"
      " selp.u32 %0, 1, 0, p;}"
      : "=r"(done)
      : "r"(bar), "r"(parity)
      : "memory");
  return done != 0;
}

template <class Traits>
struct BwdBlock {
  BwdItemView item;
  int kv_head;
  int split;
  int head_begin;
  int num_steps;

  MAGI_DEVICE BwdBlock(const BwdArgs& args, int block) {
    // Sections of kv heads outermost, then items by size, then the heads of the section.
    const int per_item = args.heads_per_section * args.num_splits;
    const int section = block / (args.num_items * per_item);
    const int rest = block - section * args.num_items * per_item;
    item = args.items[rest / per_item];
    kv_head = section * args.heads_per_section + rest % per_item / args.num_splits;
    split = rest % args.num_splits;
    head_begin = (kv_head * args.num_splits + split) * args.heads_per_block;
    num_steps = item.steps * args.heads_per_block;
  }

  // Calls f(n, entry, first query row, head, visit) for every step in order.
  template <class F>
  MAGI_DEVICE void walk(const BwdArgs& args, F&& f) const {
    const int num_entries = item.entry_end - item.entry_begin;
    const int outer_heads = args.heads_inner ? 1 : args.heads_per_block;
    const int inner_heads = args.heads_inner ? args.heads_per_block : 1;
    int outer = 0, inner = 0, e = -1, tile = 0, tiles = 0, visit = item.visit_begin;
    BwdEntryView entry{};
#pragma unroll 1
    for (int n = 0; n < num_steps; ++n) {
      if (tile == tiles) {  // next entry, perhaps of the next head
        if (++e == num_entries) e = 0, ++outer, visit = item.visit_begin;
        entry = args.entries[args.descending ? item.entry_end - 1 - e : item.entry_begin + e];
        tiles = (entry.q_end - entry.q_begin + Traits::kTileQ - 1) / Traits::kTileQ;
        tile = 0;
      }
      const int q = entry.q_begin + (args.descending ? tiles - 1 - tile : tile) * Traits::kTileQ;
      f(n, entry, q, head_begin + outer + inner, visit);
      if (++inner == inner_heads) inner = 0, ++tile, ++visit;
    }
  }
};

// ---- warp 0 of the producer warpgroup, one thread: tiles

template <class Traits>
MAGI_DEVICE void bwd_load_tiles(const BwdArgs& args, const BwdBlock<Traits>& block, uint32_t smem,
                                const BwdMaps& maps) {
  using T = Traits;
  const uint32_t bars = smem + T::kOffBars;
  const int k_start = block.item.k_start;
  ptx::mbar_arrive_expect_tx(bars + T::kBarKv, 2 * T::kKeyBytes);
  ptx::tma_load_4d(smem + T::kOffK, &maps.k, bars + T::kBarKv, 0, k_start, 0, block.kv_head,
                   ptx::kEvictFirst);
  ptx::tma_load_4d(smem + T::kOffV, &maps.v, bars + T::kBarKv, 0, k_start, 0, block.kv_head,
                   ptx::kEvictFirst);
  block.walk(args, [&](int n, const BwdEntryView&, int q, int head, int) {
    const int stage = n % T::kStages;
    const uint32_t parity = (n / T::kStages + 1) & 1;
    const uint32_t q_full = bars + T::kBarQFull + 8 * stage;
    const uint32_t do_full = bars + T::kBarDoFull + 8 * stage;
    wait_for(bars + T::kBarQEmpty + 8 * stage, parity);
    ptx::mbar_arrive_expect_tx(q_full, T::kQueryBytes);
    ptx::tma_load_4d(smem + T::kOffQ + stage * T::kQueryBytes, &maps.q, q_full, 0, q, 0, head,
                     ptx::kEvictNormal);
    wait_for(bars + T::kBarDoEmpty + 8 * stage, parity);
    ptx::mbar_arrive_expect_tx(do_full, T::kQueryBytes);
    ptx::tma_load_4d(smem + T::kOffDo + stage * T::kQueryBytes, &maps.dout, do_full, 0, q, 0, head,
                     ptx::kEvictNormal);
  });
}

// ---- warp 1 of the producer warpgroup: stats and what the step is

template <class Traits>
MAGI_DEVICE void bwd_load_stats(const BwdArgs& args, const BwdBlock<Traits>& block, uint32_t smem,
                                uint8_t* smem_ptr, int lane) {
  using T = Traits;
  const uint32_t bars = smem + T::kOffBars;
  const int k_start = block.item.k_start;
  block.walk(args, [&](int n, const BwdEntryView& entry, int q, int head, int visit) {
    const int stage = n % T::kStages;
    const float2* src = args.stats + static_cast<int64_t>(head) * args.stat_rows + q + 2 * lane;
    const float2 a = src[0], b = src[1];
    wait_for(bars + T::kBarQEmpty + 8 * stage, (n / T::kStages + 1) & 1);
    float* dst = reinterpret_cast<float*>(smem_ptr + T::kOffStats + stage * T::kStatBytes) +
                 lane % 4 * 20 + lane / 4 * 2;
    *reinterpret_cast<float2*>(dst) = {a.x, b.x};
    *reinterpret_cast<float2*>(dst + T::kStatFloats) = {a.y, b.y};
    if (lane == 0) {
      BwdStepMeta& m =
          *reinterpret_cast<BwdStepMeta*>(smem_ptr + T::kOffMeta + stage * T::kMetaBytes);
      const int shift = k_start - q;
      m.c_end = entry.q_end - q;
      m.r_lo = entry.k_lo - k_start;
      m.r_hi = entry.k_hi - k_start;
      m.b_lo = entry.d_lo - shift;
      m.b_hi = entry.d_hi - shift;
      m.q_tile = q;
      m.head = head;
      if (T::kDeterministic) m.visit = args.visits[visit];
    }
    __syncwarp();
    if (lane == 0) ptx::mbar_arrive(bars + T::kBarQFull + 8 * stage);
  });
}

// ---- warps 2 and 3 of the producer warpgroup, one thread each: half of dQ to global memory

MAGI_DEVICE int load_acquire(const int32_t* ptr) {
  int value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(ptr) : "memory");
  return value;
}
MAGI_DEVICE void add_release(int32_t* ptr, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(ptr), "r"(value) : "memory");
}

// Counters of finished visits: [2 halves][H][cells].
struct BwdCells {
  const BwdArgs& args;
  int half;
  int32_t* last = nullptr;  // first cell of a visit that has not been signalled
  int last_count = 0;

  MAGI_DEVICE int32_t* at(int cell, int head) const {
    return args.semaphores + 1 +
           (static_cast<int64_t>(half) * args.num_heads_q + head) * args.num_cells + cell;
  }
  MAGI_DEVICE bool ready(int head, const int4& visit) const {
    const int32_t* cell = at(visit.x, head);
    return (visit.z == 0 || load_acquire(cell) >= visit.z) &&
           (visit.w == 0 || load_acquire(cell + 1) >= visit.w);
  }
  MAGI_DEVICE void pending(int head, const int4& visit) {
    last = at(visit.x, head);
    last_count = visit.y;
  }
  MAGI_DEVICE void signal() {
    if (last == nullptr) return;
    asm volatile("fence.proxy.async.global;" ::: "memory");
    add_release(last, 1);
    if (last_count > 1) add_release(last + 1, 1);
    last = nullptr;
  }
};

// Deterministic mode: a tile is added when all earlier visits of its rows have finished. It is
// signalled as soon as it has arrived, or, where the next tile is there already, after that has
// been issued; but always before a wait that does not pass at once, so that nobody waits in a
// circle.
template <class Traits>
MAGI_DEVICE void bwd_reduce_dq(const BwdArgs& args, int num_steps, int half, uint32_t smem,
                               const volatile int4* dq_meta, const CUtensorMap* map_dq) {
  using T = Traits;
  const uint32_t full = smem + T::kOffBars + T::kBarDqFull + 8 * half;
  const uint32_t empty = smem + T::kOffBars + T::kBarDqEmpty + 8 * half;
  BwdCells cells{args, half};
#pragma unroll 1
  for (int n = 0; n < num_steps; ++n) {
    wait_for(full, n & 1);
    const int q = dq_meta[0].x, head = dq_meta[0].y;
    int4 visit{};
    if constexpr (T::kDeterministic) {
      visit = {dq_meta[1].x, dq_meta[1].y, dq_meta[1].z, dq_meta[1].w};
      if (!cells.ready(head, visit)) {
        ptx::bulk_wait<0>();
        cells.signal();
        while (!cells.ready(head, visit)) {
        }
      }
      asm volatile("fence.proxy.async.global;" ::: "memory");
    }
    ptx::tma_reduce_add_4d(map_dq, smem + T::kOffDq + half * T::kDqBytes, 0, q, half * T::kDqPanels,
                           head);
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
    ptx::mbar_arrive(empty);
    if constexpr (T::kDeterministic) {
      if (cells.last != nullptr) {
        ptx::bulk_wait<1>();
        cells.signal();
      }
      cells.pending(head, visit);
      if (!is_complete(full, (n + 1) & 1)) {
        ptx::bulk_wait<0>();
        cells.signal();
      }
    }
  }
  ptx::bulk_wait<0>();
  if constexpr (T::kDeterministic) cells.signal();
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

// D += A B over query rows [16 kBegin, 16 kEnd): A in registers, B an MN-major query tile.
template <class Traits, int kBegin = 0, int kEnd = Traits::kTileQ / 16>
MAGI_DEVICE void gemm_over_queries(float (&acc)[Traits::kHeadDim / 2],
                                   const uint32_t (&a)[Traits::kTileQ / 4], uint64_t b) {
  using T = Traits;
#pragma unroll
  for (int k = kBegin; k < kEnd; ++k)
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

// Zero the masked cells of this thread; register i holds key row + 8 * ((i >> 1) & 1) and query
// col + 8 * (i >> 2) + (i & 1) of the tile.
MAGI_DEVICE void mask_scores(float (&p)[32], const volatile BwdStepMeta& step, int first_row) {
  const int c_end = step.c_end, r_lo = step.r_lo, r_hi = step.r_hi;
  const int b_lo = step.b_lo, b_hi = step.b_hi;
  int thread;  // volatile: computed here, not kept in a register through the loop
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  const int row = first_row + thread % 128 / 32 * 16 + thread % 32 / 4, col = 2 * (thread % 4);
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const int c = col + 8 * (j >> 1) + (j & 1);
    const int lo = max(r_lo, c + b_lo);
    const int hi = c < c_end ? min(r_hi, c + b_hi + 1) : 0;
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

// Not to be moved by the compiler.
MAGI_DEVICE float4 load_shared(uint32_t addr) {
  float4 x;
  asm volatile("ld.volatile.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(addr)
               : "memory");
  return x;
}

// Register i of a score fragment belongs to query 8 * (i >> 2) + col + (i & 1).
MAGI_DEVICE float stat_of(const float4 (&stats)[4], int i) {
  const float4& x = stats[i >> 3];
  return i & 4 ? (i & 1 ? x.w : x.z) : (i & 1 ? x.y : x.x);
}

template <class Traits>
MAGI_DEVICE void bwd_consume(const BwdArgs& args, int block_idx, int num_steps, int wg,
                             uint32_t smem, uint8_t* smem_ptr) {
  using T = Traits;
  using Element = typename T::Element;
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const uint32_t bars = smem + T::kOffBars;
  const int first_row = 64 * wg;  // of this warpgroup's keys in the tile
  const uint32_t ds_store = smem + T::kOffDs + (first_row + 16 * warp + lane % 16) * 128;
  const uint32_t ds_swizzle = ((lane / 16) ^ (lane & 7)) << 4;
  const float ds_scale = T::kScaleInScores ? args.softmax_scale : 1.f;
  const auto arrive = [&](int bar) __attribute__((always_inline)) {
    if (lane == 0) ptx::mbar_arrive(bars + bar);
  };

  const auto finish_dq = [&]() __attribute__((always_inline)) {
    ptx::fence_async_shared();
    __syncwarp();
    arrive(T::kBarDqFull + 8 * wg);
  };

  float dk[T::kHeadDim / 2], dv[T::kHeadDim / 2];
#pragma unroll
  for (int i = 0; i < T::kHeadDim / 2; ++i) dk[i] = dv[i] = 0.f;
  if (num_steps > 0) wait_for(bars + T::kBarKv, 0);
#pragma unroll 1
  for (int n = 0; n < num_steps; ++n) {
    const int stage = n % T::kStages;
    const uint32_t parity = (n / T::kStages) & 1;
    const uint32_t q_tile = smem + T::kOffQ + stage * T::kQueryBytes;
    const uint32_t do_tile = smem + T::kOffDo + stage * T::kQueryBytes;
    const uint32_t meta = smem + T::kOffMeta + stage * T::kMetaBytes;
    const volatile BwdStepMeta& m =
        *reinterpret_cast<const BwdStepMeta*>(smem_ptr + T::kOffMeta + stage * T::kMetaBytes);
    const uint32_t stats = smem + T::kOffStats + stage * T::kStatBytes + lane % 4 * 80;

    // 1. S^T and dP^T
    float s[32], dp[32];
    wait_for(bars + T::kBarQFull + 8 * stage, parity);
    ptx::wgmma_fence();
    gemm_over_head_dim<T>(s, ptx::smem_descriptor(smem + T::kOffK + wg * 8192),
                          ptx::smem_descriptor(q_tile));
    ptx::wgmma_commit();
    // Loads and stores of shared memory queue up behind the products that were issued before them
    // (one queue, in order): so these stand before dP, the stores of dS in the middle of dV, and
    // the fence after the stores of dQ behind the products of the next step.
    float4 lse[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) lse[i] = load_shared(stats + 16 * i);
    const float4 limits = load_shared(meta);  // bits of c_end, r_lo, r_hi, b_lo
    const int b_hi = m.b_hi;
    wait_for(bars + T::kBarDoFull + 8 * stage, parity);
    ptx::wgmma_fence();
    gemm_over_head_dim<T>(dp, ptx::smem_descriptor(smem + T::kOffV + wg * 8192),
                          ptx::smem_descriptor(do_tile));
    ptx::wgmma_commit();
    if (n > 0) finish_dq();

    const bool partial =
        (__float_as_int(limits.x) < T::kTileQ) | (__float_as_int(limits.y) > first_row) |
        (__float_as_int(limits.z) < first_row + 64) |
        (__float_as_int(limits.w) > first_row - (T::kTileQ - 1)) | (b_hi < first_row + 63);

    // 2. P^T; a row that sees nothing has the stat -inf, which gives 0
    ptx::wgmma_wait<1>();
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      s[i] = ptx::exp2_approx(fmaf(s[i], args.scale_log2, stat_of(lse, i)));
    }
    if (partial) mask_scores(s, m, first_row);
    float4 delta[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) delta[i] = load_shared(stats + 4 * T::kStatFloats + 16 * i);
    uint32_t p[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) p[i] = ptx::pack2<Element>(s[2 * i], s[2 * i + 1]);

    // 3. dV
    ptx::wgmma_fence();
    gemm_over_queries<T, 0, 2>(dv, p, ptx::smem_descriptor(do_tile, T::kQueryPanelBytes));
    ptx::wgmma_commit();

    // 4. dS^T
    ptx::wgmma_wait<1>();
#pragma unroll
    for (int i = 0; i < 32; ++i) dp[i] = s[i] * fmaf(dp[i], ds_scale, stat_of(delta, i));
    uint32_t ds[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) ds[i] = ptx::pack2<Element>(dp[2 * i], dp[2 * i + 1]);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      ptx::stmatrix_x4<false>(ds_store + stage * T::kScoreBytes + (ds_swizzle ^ (j * 32)),
                              ds[4 * j], ds[4 * j + 1], ds[4 * j + 2], ds[4 * j + 3]);
    ptx::wgmma_fence();
    gemm_over_queries<T, 2>(dv, p, ptx::smem_descriptor(do_tile, T::kQueryPanelBytes));
    ptx::wgmma_commit();
    ptx::fence_async_shared();
    ptx::bar_sync(kBarScores, 256);

    // 5. and 6. The stores of dQ wait in the queue behind dK.
    float dq[T::kDqCols / 2];
    ptx::wgmma_fence();
    gemm_over_keys<T>(
        dq, ptx::smem_descriptor(smem + T::kOffDs + stage * T::kScoreBytes),
        ptx::smem_descriptor(smem + T::kOffK + wg * (T::kPanels == 2 ? T::kKeyPanelBytes : 64)));
    ptx::wgmma_commit();
    gemm_over_queries<T>(dk, ds, ptx::smem_descriptor(q_tile, T::kQueryPanelBytes));
    ptx::wgmma_commit();
    ptx::wgmma_wait<2>();  // dV
    arrive(T::kBarDoEmpty + 8 * stage);
    ptx::wgmma_wait<1>();  // dQ
    wait_for(bars + T::kBarDqEmpty + 8 * wg, (n & 1) ^ 1);
    stage_dq<T>(dq, smem + T::kOffDq + wg * T::kDqBytes, warp, lane, args.softmax_scale);
    if (warp == 0 && lane == 0) {
      int4* dq_meta = reinterpret_cast<int4*>(smem_ptr + T::kOffDqMeta + 32 * wg);
      dq_meta[0] = {m.q_tile, m.head, 0, 0};
      if (T::kDeterministic) dq_meta[1] = {m.visit.x, m.visit.y, m.visit.z, m.visit.w};
    }
    ptx::wgmma_wait<0>();  // dK
    arrive(T::kBarQEmpty + 8 * stage);
  }
  if (num_steps > 0) finish_dq();

  // K and V are no longer read: their tiles stage the gradients.
  ptx::bar_sync(kBarEpilogue, 256);
  const float dk_scale = T::kScaleInScores ? 1.f : args.softmax_scale;
  const int grad_bytes = args.grad_is_fp32 ? 4 : 2;
  const BwdBlock<T> block(args, block_idx);  // read again: registers are scarce in the loop
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
__global__ __launch_bounds__(Traits::kThreads,
                             1) void bwd_kernel(const __grid_constant__ BwdMaps maps,
                                                const __grid_constant__ BwdArgs args) {
  using T = Traits;
  uint8_t* smem_ptr = bwd_smem;
  const uint32_t smem = ptx::smem_addr(smem_ptr);
  const uint32_t bars = smem + T::kOffBars;
  int* block_slot = reinterpret_cast<int*>(smem_ptr + T::kOffBars + 8 * T::kNumBars);

  if (threadIdx.x == 0) {
    if (smem % 1024 != 0) __trap();  // swizzled tiles rely on it
    for (int i = 0; i < 2; ++i) {
      ptx::mbar_init(bars + T::kBarQFull + 8 * i, 2);
      ptx::mbar_init(bars + T::kBarQEmpty + 8 * i, 8);
      ptx::mbar_init(bars + T::kBarDoFull + 8 * i, 1);
      ptx::mbar_init(bars + T::kBarDoEmpty + 8 * i, 8);
      ptx::mbar_init(bars + T::kBarDqFull + 8 * i, 4);
      ptx::mbar_init(bars + T::kBarDqEmpty + 8 * i, 1);
    }
    ptx::mbar_init(bars + T::kBarKv, 1);
    ptx::mbar_init_fence();
    // A ticket makes sure that the blocks a block waits for have started.
    *block_slot = T::kDeterministic ? atomicAdd(args.semaphores, 1) : blockIdx.x;
  }
  __syncthreads();
  const int block_idx = T::kDeterministic ? *block_slot : blockIdx.x;
  const int wg = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);

  if (wg == 0) {
    ptx::setmaxnreg_dec<T::kProducerRegs>();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    const BwdBlock<T> block(args, block_idx);
    if (block.num_steps > 0) {
      if (warp == 0 && threadIdx.x == 0) bwd_load_tiles<T>(args, block, smem, maps);
      if (warp == 1) bwd_load_stats<T>(args, block, smem, smem_ptr, threadIdx.x % 32);
      if (warp >= 2 && threadIdx.x % 32 == 0)
        bwd_reduce_dq<T>(args, block.num_steps, warp - 2, smem,
                         reinterpret_cast<const int4*>(smem_ptr + T::kOffDqMeta) + 2 * (warp - 2),
                         &maps.dq);
    }
  } else {
    ptx::setmaxnreg_inc<T::kConsumerRegs>();
    bwd_consume<T>(args, block_idx, BwdBlock<T>(args, block_idx).num_steps, wg - 1, smem, smem_ptr);
  }
}

}  // namespace magi
