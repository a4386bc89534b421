// Flex-attention forward for sm_90a.
//
// Problem: out = softmax(scale * Q K^T | mask) V per head, mask = union of banded rectangles.
// A work item is (query tile of 64 rows per consumer, head). One block owns an item from first to
// last key, so there are no atomics on outputs and the result is the same bits in every run. With
// `pack` > 1 the rows of a tile are tokens x pack query heads of one kv head:
// row = token * pack + head.
//
// Blocks are persistent (one per SM). Items are numbered by kv-head section, then longest first,
// then head; a block takes item blockIdx.x first and then what the global counter hands out.
//
// Roles: warpgroup 0 = producer (thread 0 loads; warps 1-3 write the rows no slice covers),
//        warpgroups 1.. = two or three consumers of 64 rows each.
//
// The consumers see one endless stream of steps (a step = one key tile), across items:
//   iteration g:  S = Q K(g+1)^T  |  O += P(g) V(g)  |  softmax of S beside the second product
//   then, if step g was the last of its item, O leaves; P(g+1) = S.
// So the next item's first product already runs while the last one's output is written, and the two
// matrix products exist once in the code (nvcc serialises wgmma when they are in several copies).
// The stream begins with a product of nothing (P = 0) and ends with one whose S is not used.
//
// Barriers (mbarrier)   arrives                                          waits
//   full_k[]            bytes of K, of Q too in an item's first step     consumers
//   full_v[]            bytes of V                                       consumers
//   empty_q[]           lane 0 of each consumer warp, after the last     producer
//                       Q K^T of the item
//   empty_k/v[]         lane 0 of each consumer warp, product done       producer
// Named barriers: 1.. = output staging of a consumer (128 threads).
//
// Step record (2 x int4 beside each K tile): {flags, rows of the slice} and {keys of the slice,
//   band}, relative to the tile's first token and key. It has 2 * kStages slots: the producer
//   reuses a slot only after the K tile kStages later is released, by which time its mask has been
//   applied.
// Item record: {out_start, num_tokens, head or kv head, -}; kQStages + 2 slots, because an item's
//   output leaves after the first Q K^T of the item behind it (which may be a one-step item).
//
// Registers of a consumer thread (head_dim 128), of 160: O 64, S 40, P 20, softmax state 6. Shared
// memory: Q 2 x 48 KB, K and V 2 x 20 KB each, output 48 KB.
#pragma once
#include "../common/mask.h"
#include "../common/ptx.h"
#include "../params.h"
#include "../traits.h"

namespace magi {

using namespace ptx;

constexpr float kLn2 = 0.69314718056f;

enum StepFlags : int { kStepMasked = 1, kStepFirst = 2, kStepLast = 4, kStepEnd = 8 };

struct FwdKernelParams {
  CUtensorMap map_q, map_k, map_v, map_out;
  MagiFwdParams args;
  // A unit is what one block computes of a tile: a head, or `pack` heads of one kv head.
  int32_t num_items;  // tiles x units
  int32_t num_units;
  int32_t section_units;  // units of one section
  int32_t units_per_kv;
  int32_t pack_shift;  // log2(pack)
  float scale_log2;    // softmax_scale * log2(e)
  float inverse_scale_log2;
};

// A position in a ring of kSlots slots and the parity of its current pass.
template <int kSlots>
struct RingPosition {
  int slot = 0;
  uint32_t phase = 0;
  MAGI_DEVICE void advance() {
    if (++slot == kSlots) {
      slot = 0;
      phase ^= 1;
    }
  }
};

// ------------------------------------------------------------------ producer

template <class Traits>
struct FwdProducer {
  using Storage = typename Traits::SharedStorage;
  const FwdKernelParams& p;
  Storage& smem;
  RingPosition<Traits::kStages> ring_k, ring_v;
  RingPosition<Traits::kQStages> ring_q;
  int record_slot = 0, info_slot = 0;
  int pending_key = -1, pending_kv_head = 0;  // V tile of the step before

  MAGI_DEVICE FwdProducer(const FwdKernelParams& params, Storage& storage)
      : p(params), smem(storage) {}

  MAGI_DEVICE void load_pending_v() {
    if (pending_key < 0) return;
    mbar_wait(smem_addr(&smem.empty_v[ring_v.slot]), ring_v.phase ^ 1);
    const uint32_t bar = smem_addr(&smem.full_v[ring_v.slot]);
    mbar_arrive_expect_tx(bar, Traits::kKVBytes);
    tma_load_4d(smem_addr(smem.v[ring_v.slot]), &p.map_v, bar, 0, pending_key, 0, pending_kv_head,
                kEvictLast);
    ring_v.advance();
  }

  // `flags` of the step decide what is loaded: Q too for an item's first step, nothing at the end.
  MAGI_DEVICE void push_step(int4 rows, int4 keys, int key, int kv_head, int q_start, int unit) {
    mbar_wait(smem_addr(&smem.empty_k[ring_k.slot]), ring_k.phase ^ 1);
    smem.records[record_slot][0] = rows;
    smem.records[record_slot][1] = keys;
    record_slot = record_slot + 1 == Traits::kRecordSlots ? 0 : record_slot + 1;
    const uint32_t bar = smem_addr(&smem.full_k[ring_k.slot]);
    if (rows.x & kStepEnd) {
      mbar_arrive(bar);
    } else {
      const bool first = (rows.x & kStepFirst) != 0;
      mbar_arrive_expect_tx(bar,
                            Traits::kKVBytes + (first ? Traits::kConsumers * Traits::kQBytes : 0));
      if (first) load_q(bar, q_start, unit);
      tma_load_4d(smem_addr(smem.k[ring_k.slot]), &p.map_k, bar, 0, key, 0, kv_head, kEvictLast);
    }
    ring_k.advance();
    load_pending_v();
    pending_key = key;
    pending_kv_head = kv_head;
  }

  MAGI_DEVICE void load_q(uint32_t bar, int q_start, int unit) {
    const int tokens = 64 >> p.pack_shift;
#pragma unroll
    for (int c = 0; c < Traits::kConsumers; ++c) {
      const uint32_t dst = smem_addr(smem.q[ring_q.slot][c]);
      const int token = q_start + c * tokens;
      if (p.pack_shift == 0)
        tma_load_4d(dst, &p.map_q, bar, 0, token, 0, unit, kEvictFirst);
      else
        tma_load_5d(dst, &p.map_q, bar, 0, 0, token, 0, unit, kEvictFirst);
    }
    ring_q.advance();
  }

  MAGI_DEVICE void run_item(int item) {
    const int section_items = p.args.num_tiles * p.section_units;
    const int section = item / section_items;
    const int first_unit = section * p.section_units;
    const int units = min(p.section_units, p.num_units - first_unit);
    const int in_section = item - section * section_items;
    const int unit = first_unit + in_section % units;
    const int kv_head = unit / p.units_per_kv;
    const FwdTile tile = reinterpret_cast<const FwdTile*>(p.args.tiles)[in_section / units];
    const FwdEntry* entry = reinterpret_cast<const FwdEntry*>(p.args.entries) + tile.entry_begin;
    mbar_wait(smem_addr(&smem.empty_q[ring_q.slot]), ring_q.phase ^ 1);
    smem.infos[info_slot] = make_int4(tile.out_start, tile.num_tokens, unit, 0);
    info_slot = info_slot + 1 == Traits::kInfoSlots ? 0 : info_slot + 1;
    int flags = kStepFirst;
    for (int steps_left = tile.num_steps; steps_left > 0; ++entry) {
      const int num_tiles = entry->num_tiles, full_begin = entry->full_begin;
      const int full_end = entry->full_end;
      int key = entry->k_begin;
      for (int j = 0; j < num_tiles; ++j, --steps_left, key += Traits::kBlockN) {
        if (steps_left == 1) flags |= kStepLast;
        int4 rows = make_int4(flags, 0, 0, 0), keys = rows;
        if (j < full_begin || j >= full_end) {
          const Band band = entry->band.relative_to(tile.q_start, key);
          rows = make_int4(flags | kStepMasked, band.q_start, band.q_end, 0);
          keys = make_int4(band.k_start, band.k_end, band.d_lo, band.d_hi);
        }
        push_step(rows, keys, key, kv_head, tile.q_start, unit);
        flags = 0;
      }
    }
  }

  MAGI_DEVICE void run() {
    int item = blockIdx.x;
    while (item < p.num_items) {
      const int next = atomicAdd(p.args.counter, 1) + gridDim.x;  // used after this item
      run_item(item);
      item = next;
    }
    const int4 end = make_int4(kStepEnd, 0, 0, 0);
    push_step(end, end, -1, 0, 0, 0);
    // The last block to come here resets the counters for the next launch.
    __threadfence();
    if (atomicAdd(p.args.counter + 1, 1) == static_cast<int>(gridDim.x) - 1) {
      p.args.counter[0] = 0;
      p.args.counter[1] = 0;
    }
  }
};

// Rows that no slice covers: out = 0, lse = -inf. One warp per (row, head), grid-strided.
template <class Traits>
MAGI_DEVICE void fill_empty_rows(const FwdKernelParams& p, int warp, int num_warps, int lane) {
  const MagiFwdParams& a = p.args;
  if (a.merge) return;
  const int bytes = a.out_dtype == kMagiFp32 ? 4 : 2;
  const int chunks = Traits::kHeadDim * bytes / 16;
  for (int range = 0; range < a.num_empty_ranges; ++range) {
    const int begin = a.empty_rows[2 * range], end = a.empty_rows[2 * range + 1];
    for (int64_t x = warp; x < static_cast<int64_t>(end - begin) * a.num_heads_q; x += num_warps) {
      const int64_t row = begin + x / a.num_heads_q, head = x % a.num_heads_q;
      char* out = static_cast<char*>(a.out.data) +
                  (row * a.out.stride_token + head * a.out.stride_head) * bytes;
      if (lane < chunks) reinterpret_cast<int4*>(out)[lane] = make_int4(0, 0, 0, 0);
      if (lane == 0) a.lse[row * a.lse_stride_token + head * a.lse_stride_head] = -INFINITY;
    }
  }
}

// ------------------------------------------------------------------ consumer

// Keeps the compiler from moving reads or copies of wgmma registers across this point.
template <int kCount>
MAGI_DEVICE void pin_registers(float (&regs)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(regs[i])::"memory");
}

template <class Traits>
struct FwdConsumer {
  using Element = typename Traits::Element;
  using Storage = typename Traits::SharedStorage;
  static constexpr int kN = Traits::kBlockN;
  static constexpr int kD = Traits::kHeadDim;
  static constexpr int kScores = kN / 2;
  static constexpr int kOuts = kD / 2;

  const FwdKernelParams& p;
  Storage& smem;
  const int consumer;
  const int thread;  // 0..127 in the warpgroup
  const int lane;
  const int row;  // first of this thread's two rows (row, row + 8) in the tile

  MAGI_DEVICE FwdConsumer(const FwdKernelParams& params, Storage& storage, int consumer_idx)
      : p(params),
        smem(storage),
        consumer(consumer_idx),
        thread(threadIdx.x & 127),
        lane(threadIdx.x & 31),
        row(consumer_idx * 64 + (threadIdx.x & 127) / 32 * 16 + (threadIdx.x & 31) / 4) {}

  // Lane 0 arrives for its warp. So that its arrival covers every read of what the producer writes
  // with ordinary stores, only lane 0 reads that, and hands it round.
  MAGI_DEVICE void release(uint64_t* empty) const {
    if (lane == 0) mbar_arrive(smem_addr(empty));
  }
  MAGI_DEVICE int shared_by_lane0(const int& source) const {
    return __shfl_sync(0xffffffff, lane == 0 ? source : 0, 0);
  }
  MAGI_DEVICE int4 shared_by_lane0(const int4& source) const {
    const int4 x = lane == 0 ? source : make_int4(0, 0, 0, 0);
    return make_int4(__shfl_sync(0xffffffff, x.x, 0), __shfl_sync(0xffffffff, x.y, 0),
                     __shfl_sync(0xffffffff, x.z, 0), __shfl_sync(0xffffffff, x.w, 0));
  }

  MAGI_DEVICE void issue_scores(float (&s)[kScores], int q_slot, int k_slot) const {
    const uint64_t q = smem_descriptor(smem_addr(smem.q[q_slot][consumer]));
    const uint64_t k = smem_descriptor(smem_addr(smem.k[k_slot]));
#pragma unroll
    for (int i = 0; i < kD / 16; ++i)
      Wgmma<kN, Element>::template ss<0, 0>(
          s, descriptor_plus(q, i % 4 * 32 + i / 4 * Traits::kQPanelBytes),
          descriptor_plus(k, i % 4 * 32 + i / 4 * Traits::kKVPanelBytes), i != 0);
  }
  MAGI_DEVICE void issue_output(float (&o)[kOuts], const uint32_t (&probs)[kScores / 2], int v_slot,
                                int accumulate) const {
    const uint64_t v = smem_descriptor(smem_addr(smem.v[v_slot]), Traits::kKVPanelBytes);
#pragma unroll
    for (int i = 0; i < kN / 16; ++i)
      Wgmma<kD, Element>::template rs<1>(o, probs + 4 * i, descriptor_plus(v, i * 2048),
                                         i == 0 ? accumulate : 1);
  }

  // Hides cells outside the band. Each warp votes which side of the interval cuts its rows: mostly
  // one of them, and often none.
  MAGI_DEVICE void apply_mask(float (&s)[kScores], int4 rows, int4 keys) const {
    const Band band = {rows.y, rows.z, keys.x, keys.y, keys.z, keys.w};
    int begin[2],
        end[2];  // in this thread's numbering: its column j stands at key 8 * (j / 2) + j % 2
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Interval visible = band.keys_of((row + 8 * h) >> p.pack_shift);
      begin[h] = visible.begin - 2 * (lane & 3);
      end[h] = visible.end - 2 * (lane & 3);
    }
    if (__any_sync(0xffffffff, max(begin[0], begin[1]) > 0)) {
#pragma unroll
      for (int j = 0; j < kScores; ++j)
        if (8 * (j >> 2) + (j & 1) < begin[(j >> 1) & 1]) s[j] = -INFINITY;
    }
    if (__any_sync(0xffffffff, min(end[0], end[1]) < kN - 6)) {
#pragma unroll
      for (int j = 0; j < kScores; ++j)
        if (8 * (j >> 2) + (j & 1) >= end[(j >> 1) & 1]) s[j] = -INFINITY;
    }
  }

  struct RowAddress {
    int64_t token, head;
    bool valid;
  };
  MAGI_DEVICE RowAddress address_of(int tile_row, int4 info) const {
    const int token = tile_row >> p.pack_shift;
    const int head_in_group = tile_row & ((1 << p.pack_shift) - 1);
    return {static_cast<int64_t>(info.x) + token, (info.z << p.pack_shift) + head_in_group,
            token < info.y};
  }

  MAGI_DEVICE static float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
  }
  MAGI_DEVICE static float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
  }

  // State of online softmax for this thread's two rows. Scores enter as exp2(scale_log2 * score -
  // shift). The shift follows the row's maximum lazily: it moves only when a score is more than
  // kSlack above it. exp2(kSlack) is far from any overflow and the final division cancels it, so
  // most steps need neither the maximum of the whole row nor any rescaling. All four lanes of a row
  // hold the same shift; row_sum is each lane's own part. Source of the idea: conditional rescaling
  // in FlashAttention-4.
  struct SoftmaxState {
    float minus_shift[2], limit[2], row_sum[2];
    MAGI_DEVICE void reset() {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        minus_shift[h] = 0.f;
        limit[h] = -INFINITY;
        row_sum[h] = 0.f;
      }
    }
  };

  // Turns scores into unnormalised probabilities. Returns whether the accumulators of this warp
  // must be multiplied by alpha.
  MAGI_DEVICE bool softmax_step(float (&s)[kScores], SoftmaxState& state, float (&alpha)[2]) const {
    constexpr float kSlack = 8.f;  // log2
    float top[2][2];               // two chains per row, for latency
#pragma unroll
    for (int i = 0; i < 4; ++i) top[i >> 1][i & 1] = s[i];
#pragma unroll
    for (int j = 4; j < kScores; ++j)
      top[(j >> 1) & 1][j & 1] = fmaxf(top[(j >> 1) & 1][j & 1], s[j]);
    const float top0 = fmaxf(top[0][0], top[0][1]), top1 = fmaxf(top[1][0], top[1][1]);
    alpha[0] = alpha[1] = 1.f;
    const bool rescale = __any_sync(0xffffffff, top0 > state.limit[0] || top1 > state.limit[1]);
    if (rescale) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float seen = quad_max(h == 0 ? top0 : top1);
        if (seen > state.limit[h]) {
          const float minus_shift = -seen * p.scale_log2;
          // A row that saw nothing before has sums of 0, which any finite alpha leaves.
          alpha[h] =
              state.limit[h] == -INFINITY ? 0.f : exp2_approx(minus_shift - state.minus_shift[h]);
          state.minus_shift[h] = minus_shift;
          state.limit[h] = seen + kSlack * p.inverse_scale_log2;
          state.row_sum[h] *= alpha[h];
        }
      }
    }
    float sum[2][2] = {{state.row_sum[0], 0.f}, {state.row_sum[1], 0.f}};
#pragma unroll
    for (int j = 0; j < kScores; j += 2) {
      const int h = (j >> 1) & 1;
      const float lo = exp2_approx(fmaf(s[j], p.scale_log2, state.minus_shift[h]));
      const float hi = exp2_approx(fmaf(s[j + 1], p.scale_log2, state.minus_shift[h]));
      sum[h][0] += lo;
      sum[h][1] += hi;
      s[j] = lo;
      s[j + 1] = hi;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) state.row_sum[h] = sum[h][0] + sum[h][1];
    return rescale;
  }

  // The rows of an item are complete except for the last product: writes lse and returns the
  // weights of the accumulators (1 / sum) and of the earlier result (0 unless merging).
  MAGI_DEVICE void finish_rows(int4 info, const SoftmaxState& state, float (&weight)[2],
                               float (&weight_prev)[2]) const {
    const MagiFwdParams& a = p.args;
    float prev[2], lse[2];
    float* dst[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = quad_sum(state.row_sum[h]);
      lse[h] = sum == 0.f ? -INFINITY : fmaf(state.minus_shift[h], -kLn2, __logf(sum));
      weight[h] = sum == 0.f ? 0.f : __fdividef(1.f, sum);
      const RowAddress at = address_of(row + 8 * h, info);
      dst[h] =
          at.valid ? a.lse + at.token * a.lse_stride_token + at.head * a.lse_stride_head : nullptr;
      prev[h] = at.valid && a.merge ? *dst[h] : -INFINITY;
    }
    __syncwarp();  // all four lanes of a row have read the earlier lse
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float top = fmaxf(prev[h], lse[h]);
      if (a.merge && top != -INFINITY) {
        const float e_prev = __expf(prev[h] - top), e_cur = __expf(lse[h] - top);
        const float inverse = __fdividef(1.f, e_prev + e_cur);
        weight_prev[h] = e_prev * inverse;
        weight[h] *= e_cur * inverse;
        lse[h] = top + __logf(e_prev + e_cur);
      }
      if ((lane & 3) == 0 && dst[h] != nullptr) *dst[h] = lse[h];
    }
  }

  // 16-bit whole tile: stmatrix into the staging buffer, one TMA store per consumer.
  MAGI_DEVICE void store_tma(const float (&o)[kOuts], int4 info) const {
    const uint32_t stage = smem_addr(smem.out) + consumer * Traits::kQBytes;
    if (thread == 0) bulk_wait_read<0>();  // the store of the item before has left the buffer
    bar_sync(1 + consumer, 128);
    const uint32_t stage_row = thread / 32 * 16 + lane % 16;
#pragma unroll
    for (int j = 0; j < kD / 16; ++j)
      stmatrix_x4<false>(
          stage + j / 4 * Traits::kQPanelBytes + swizzle_offset(stage_row, j % 4 * 2 + (lane >> 4)),
          pack2<Element>(o[8 * j], o[8 * j + 1]), pack2<Element>(o[8 * j + 2], o[8 * j + 3]),
          pack2<Element>(o[8 * j + 4], o[8 * j + 5]), pack2<Element>(o[8 * j + 6], o[8 * j + 7]));
    fence_async_shared();
    bar_sync(1 + consumer, 128);
    if (thread == 0) {
      const int token = info.x + consumer * (64 >> p.pack_shift);
      if (p.pack_shift == 0)
        tma_store_4d(&p.map_out, stage, 0, token, 0, info.z);
      else
        tma_store_5d(&p.map_out, stage, 0, 0, token, 0, info.z);
      bulk_commit();
    }
  }

  // Any rows, any output type, straight from registers; adds weight_prev * out when merging.
  MAGI_DEVICE void store_direct(const float (&o)[kOuts], int4 info,
                                const float (&weight_prev)[2]) const {
    const MagiFwdParams& a = p.args;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const RowAddress at = address_of(row + 8 * h, info);
      if (!at.valid) continue;
      const int64_t offset =
          at.token * a.out.stride_token + at.head * a.out.stride_head + 2 * (lane & 3);
      if (a.out_dtype != kMagiFp32) {
        Element* dst = static_cast<Element*>(a.out.data) + offset;
#pragma unroll
        for (int j = 0; j < kD / 8; ++j)
          *reinterpret_cast<uint32_t*>(dst + 8 * j) =
              pack2<Element>(o[4 * j + 2 * h], o[4 * j + 2 * h + 1]);
      } else {
        float* dst = static_cast<float*>(a.out.data) + offset;
#pragma unroll
        for (int j = 0; j < kD / 8; ++j) {
          float2 value = make_float2(o[4 * j + 2 * h], o[4 * j + 2 * h + 1]);
          float2* cell = reinterpret_cast<float2*>(dst + 8 * j);
          if (a.merge && weight_prev[h] != 0.f) {
            const float2 prev = *cell;
            value.x = fmaf(prev.x, weight_prev[h], value.x);
            value.y = fmaf(prev.y, weight_prev[h], value.y);
          }
          *cell = value;
        }
      }
    }
  }

  MAGI_DEVICE void store_output(const float (&o)[kOuts], int4 info,
                                const float (&weight_prev)[2]) const {
    // A whole box, or one that the end of the tensor clips.
    const bool whole =
        ((consumer + 1) * 64 >> p.pack_shift) <= info.y ||
        (info.x + info.y == p.args.num_q && (consumer * 64 >> p.pack_shift) < info.y);
    if (Traits::kStageOut && whole && p.args.out_dtype != kMagiFp32)
      store_tma(o, info);
    else
      store_direct(o, info, weight_prev);
  }

  MAGI_DEVICE void run() const {
    float o[kOuts], s[kScores];
    uint32_t probs[kScores / 2];
    SoftmaxState state;
    state.reset();
    RingPosition<Traits::kStages> ring_k, ring_v;
    RingPosition<Traits::kQStages> ring_q;
    int record_slot = 0, info_slot = 0;  // info_slot: of the item whose O is accumulated
    bool started = false;                // false in the first iteration: there is no step g yet
    int accumulate = 0;
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) probs[i] = 0;

    while (true) {
      // 1. S = Q K(g+1)^T, O += P(g) V(g).
      mbar_wait(smem_addr(&smem.full_k[ring_k.slot]), ring_k.phase);
      const int4* record = smem.records[record_slot];
      const int flags = shared_by_lane0(record[0].x);
      pin_registers(o);
      wgmma_fence();
      issue_scores(s, ring_q.slot, ring_k.slot);
      wgmma_commit();
      if (started) mbar_wait(smem_addr(&smem.full_v[ring_v.slot]), ring_v.phase);
      wgmma_fence();
      issue_output(o, probs, ring_v.slot, accumulate);
      wgmma_commit();
      wgmma_wait<1>();
      pin_registers(s);
      release(&smem.empty_k[ring_k.slot]);
      if (flags & kStepLast) release(&smem.empty_q[ring_q.slot]);
      ring_k.advance();
      if (flags & kStepLast) ring_q.advance();

      // 2. Softmax of step g+1; a new item first closes the sums of the old one.
      float alpha[2], weight[2] = {0.f, 0.f}, weight_prev[2] = {0.f, 0.f};
      const bool new_item = (flags & (kStepFirst | kStepEnd)) != 0;
      if (new_item) {
        if (started)
          finish_rows(shared_by_lane0(smem.infos[info_slot]), state, weight, weight_prev);
        state.reset();
      }
      if (flags & kStepMasked)
        apply_mask(s, shared_by_lane0(record[0]), shared_by_lane0(record[1]));
      const bool rescale = softmax_step(s, state, alpha);
      compute_before_wait(state.row_sum[0] + state.row_sum[1], smem_addr(&smem.infos[0]));
      record_slot = record_slot + 1 == Traits::kRecordSlots ? 0 : record_slot + 1;

      // 3. Step g is complete: rescale O, or let it leave.
      wgmma_wait<0>();
      pin_registers(o);
      if (started) {
        release(&smem.empty_v[ring_v.slot]);
        ring_v.advance();
      }
      if (rescale || new_item) {
#pragma unroll
        for (int j = 0; j < kOuts; ++j) {
          const int h = (j >> 1) & 1;
          o[j] *= new_item ? weight[h] : alpha[h];
        }
        if (new_item && started) {
          store_output(o, shared_by_lane0(smem.infos[info_slot]), weight_prev);
          info_slot = info_slot + 1 == Traits::kInfoSlots ? 0 : info_slot + 1;
        }
      }
      if (flags & kStepEnd) break;
      accumulate = new_item ? 0 : 1;
      started = true;

      // 4. P(g+1), in place as the A operand of the next product. (Packing beside the product in
      // flight, into other registers, was 7 % slower.)
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) probs[i] = pack2<Element>(s[2 * i], s[2 * i + 1]);
    }
    if (thread == 0) bulk_wait<0>();
  }
};

template <class Traits>
__global__ __launch_bounds__(Traits::kThreads,
                             1) void flex_fwd_kernel(const __grid_constant__ FwdKernelParams p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  using Storage = typename Traits::SharedStorage;
  Storage& smem = *reinterpret_cast<Storage*>(raw);
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  const int warpgroup = warp / 4;
  if (threadIdx.x == 0) {
    const int consumer_warps = 4 * Traits::kConsumers;
    for (int i = 0; i < Traits::kQStages; ++i) {
      mbar_init(smem_addr(&smem.empty_q[i]), consumer_warps);
    }
    for (int i = 0; i < Traits::kStages; ++i) {
      mbar_init(smem_addr(&smem.full_k[i]), 1);
      mbar_init(smem_addr(&smem.full_v[i]), 1);
      mbar_init(smem_addr(&smem.empty_k[i]), consumer_warps);
      mbar_init(smem_addr(&smem.empty_v[i]), consumer_warps);
    }
    mbar_init_fence();
    if (p.num_items > 0) {
      prefetch_tensor_map(&p.map_q);
      prefetch_tensor_map(&p.map_k);
      prefetch_tensor_map(&p.map_v);
      prefetch_tensor_map(&p.map_out);
    }
  }
  __syncthreads();
  if (warpgroup == 0) {
    setmaxnreg_dec<Traits::kProducerRegs>();
    if (warp == 0) {
      if (elect_one()) FwdProducer<Traits>(p, smem).run();
    } else {
      fill_empty_rows<Traits>(p, blockIdx.x * 3 + warp - 1, gridDim.x * 3, threadIdx.x & 31);
    }
  } else {
    setmaxnreg_inc<Traits::kConsumerRegs>();
    FwdConsumer<Traits>(p, smem, warpgroup - 1).run();
  }
}

}  // namespace magi
