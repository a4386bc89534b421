// Outputs of the kernel: lse and out of a finished item, and the rows that no slice covers.
#pragma once
#include "softmax.cuh"

namespace magi {

constexpr float kLn2 = 0.69314718056f;

// Does this row see a key in the walk of its tile? An entry of a walk that was cut has the band of
// the whole slice, so only the keys of its own tiles count.
template <class Traits>
MAGI_DEVICE bool sees_a_key(const FwdRows<Traits>& me, int tile_index, int tile_row) {
  const MagiFwdParams& a = me.p.args;
  const FwdTile& tile = reinterpret_cast<const FwdTile*>(a.tiles)[tile_index];
  const FwdEntry* entry = reinterpret_cast<const FwdEntry*>(a.entries) + tile.entry_begin;
  const int q = tile.q_start + (tile_row >> me.p.pack_shift);
#pragma unroll 1
  for (int steps = tile.num_steps; steps > 0; steps -= entry->num_tiles, ++entry) {
    const Interval seen = entry->band.keys_of(q);
    const int end = entry->k_begin + entry->num_tiles * Traits::kBlockN;
    if (max(seen.begin, entry->k_begin) < min(seen.end, end)) return true;
  }
  return false;
}

// Rows whose probabilities have the sum 0: they see nothing, or only scores of -inf, which have no
// softmax. Few warps have such a row, so the work list is read for them alone.
template <class Traits>
MAGI_DEVICE void fail_rows(const FwdRows<Traits>& me, FwdItem item, const bool (&unsummed)[2],
                           float (&lse)[2], float (&weight)[2]) {
  if (!__any_sync(0xffffffff, unsummed[0] || unsummed[1])) return;
#pragma unroll 1
  for (int h = 0; h < 2; ++h) {
    const bool asked = h == 0 ? unsummed[0] : unsummed[1];
    if (!asked || !sees_a_key(me, item.tile, me.row + 8 * h)) continue;
    (h == 0 ? lse[0] : lse[1]) = NAN;
    (h == 0 ? weight[0] : weight[1]) = NAN;
  }
}

// *place = max(*place, x); *place must not be nan or -0.
MAGI_DEVICE void atomic_max(float* place, float x) {
  x += 0.f;  // -0 becomes 0
  if (x >= 0.f)
    atomicMax(reinterpret_cast<int*>(place), __float_as_int(x));
  else  // negative floats are ordered against their bits
    atomicMin(reinterpret_cast<unsigned*>(place), __float_as_uint(x));
}

// The logit of a row's largest score; with softcap, of its largest tanh, or of its largest
// probability.
template <class Traits>
MAGI_DEVICE float logit_of(const FwdKernelParams& p, float top) {
  if constexpr (!Traits::kSoftcap) return top * p.args.softmax_scale;
  return p.unshifted ? __logf(top) : top * p.args.softcap;
}

// Raises the largest logits of the heads to those of this warp's rows; top: of this lane's two.
template <class Traits>
MAGI_DEVICE void raise_max_logits(const FwdRows<Traits>& me, FwdItem item, const float (&top)[2]) {
  const MagiFwdParams& a = me.p.args;
  const int pack = 1 << me.p.pack_shift;
  float most[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const auto at = me.address_of(me.row + 8 * h, item);
    most[h] = quad_max(at.valid ? logit_of<Traits>(me.p, top[h]) : -INFINITY);
  }
  if (pack <= 8) most[0] = most[1] = fmaxf(most[0], most[1]);  // rows 8 apart have one head
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    for (int lanes = 4 * pack; lanes < 32; lanes *= 2)
      most[h] = fmaxf(most[h], __shfl_xor_sync(0xffffffff, most[h], lanes));
    const bool mine = (me.lane & 3) == 0 && me.lane / 4 < pack && (h == 0 || pack > 8);
    if (mine && most[h] > -INFINITY)
      atomic_max(a.max_logits + me.address_of(me.row + 8 * h, item).head, most[h]);
  }
}

// The logit without a value row that joins a row; -inf: none. In later parts of a walk that was cut
// there is none, because it is in the first part.
MAGI_DEVICE float sink_of(const MagiFwdParams& a, int64_t token, int64_t head) {
  const bool joins = a.sink_lse != nullptr && token < a.num_q;
  return joins ? __ldg(a.sink_lse + token * a.sink_stride_token + head) : -INFINITY;
}

// The rows of an item are complete except for the last product: writes lse and returns the
// weights of the accumulators (1 / sum) and of the earlier result (0 unless merging). A sink joins
// as an earlier result of zeros; a launch has one of the two at most.
template <class Traits>
MAGI_DEVICE void finish_rows(const FwdRows<Traits>& me, FwdItem item,
                             const SoftmaxState<Traits::kMaxLogits>& state, float (&weight)[2],
                             float (&weight_prev)[2]) {
  const MagiFwdParams& a = me.p.args;
  if constexpr (Traits::kMaxLogits && !Traits::kTellsLargest) {
    if (!Traits::kSoftcap || a.max_logits != nullptr) raise_max_logits(me, item, state.top);
  }
  const bool joins = a.merge || a.sink_lse != nullptr;
  float prev[2], lse[2];
  float* dst[2];
  bool unsummed[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = quad_sum(state.row_sum[h]);
    lse[h] = sum == 0.f ? -INFINITY : fmaf(state.minus_shift[h], -kLn2, __logf(sum));
    weight[h] = sum == 0.f ? 0.f : __fdividef(1.f, sum);
    const auto at = me.address_of(me.row + 8 * h, item);
    unsummed[h] = sum == 0.f && at.valid;
    dst[h] =
        at.valid ? a.lse + at.token * a.lse_stride_token + at.head * a.lse_stride_head : nullptr;
    prev[h] = !at.valid ? -INFINITY : a.merge ? *dst[h] : sink_of(a, at.token, at.head);
  }
  fail_rows(me, item, unsummed, lse, weight);
  __syncwarp();  // all four lanes of a row have read the earlier lse
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float top = fmaxf(prev[h], lse[h]);  // of nan and a number: the number
    if (joins && (top != -INFINITY || isnan(prev[h]))) {
      const float e_prev = __expf(prev[h] - top), e_cur = __expf(lse[h] - top);
      const float inverse = __fdividef(1.f, e_prev + e_cur);
      weight_prev[h] = e_prev * inverse;
      weight[h] *= e_cur * inverse;
      lse[h] = top + __logf(e_prev + e_cur);
    }
    if ((me.lane & 3) == 0 && dst[h] != nullptr) *dst[h] = lse[h];
  }
}

// 16-bit whole tile: stmatrix into the staging buffer, one TMA store per consumer.
template <class Traits>
MAGI_DEVICE void store_tma(const FwdRows<Traits>& me, const float (&o)[Traits::kValueDim / 2],
                           FwdItem item) {
  using Element = typename Traits::Element;
  const uint32_t stage = smem_addr(me.smem.out) + me.consumer * Traits::kOutBytes;
  if (me.thread == 0) bulk_wait_read<0>();  // the store of the item before has left the buffer
  bar_sync(1 + me.consumer, 128);
  const uint32_t stage_row = me.thread / 32 * 16 + me.lane % 16;
#pragma unroll
  for (int j = 0; j < Traits::kValueDim / 16; ++j)
    stmatrix_x4(stage + j / Traits::kPanelSteps * Traits::kQPanelBytes +
                    swizzle_offset<Traits::kPanelCols>(
                        stage_row, j % Traits::kPanelSteps * 2 + (me.lane >> 4)),
                pack2<Element>(o[8 * j], o[8 * j + 1]), pack2<Element>(o[8 * j + 2], o[8 * j + 3]),
                pack2<Element>(o[8 * j + 4], o[8 * j + 5]),
                pack2<Element>(o[8 * j + 6], o[8 * j + 7]));
  fence_async_shared();
  bar_sync(1 + me.consumer, 128);
  if (me.thread == 0) {
    const int token = item.out_start + me.consumer * (64 >> me.p.pack_shift);
    if (me.p.pack_shift == 0)
      tma_store_4d(&me.p.map_out, stage, 0, token, 0, item.unit);
    else
      tma_store_5d(&me.p.map_out, stage, 0, 0, token, 0, item.unit);
    bulk_commit();
  }
}

// Any rows, 16-bit, straight from registers. Two neighbouring lanes exchange halves of two groups
// of eight columns, so that each stores 8 bytes and the four lanes of a row whole sectors of 32.
template <class Traits>
MAGI_DEVICE void store_rows(const FwdRows<Traits>& me, const float (&o)[Traits::kValueDim / 2],
                            FwdItem item) {
  using Element = typename Traits::Element;
  const MagiTensor& out = me.p.args.out;
  const bool odd = (me.lane & 1) != 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const auto at = me.address_of(me.row + 8 * h, item);
    Element* dst = static_cast<Element*>(out.data) + at.token * out.stride_token +
                   at.head * out.stride_head + (odd ? 8 : 0) + 2 * (me.lane & 2);
#pragma unroll
    for (int j = 0; j < Traits::kValueDim / 16; ++j) {
      const float* x = o + 8 * j + 2 * h;
      const uint32_t left = pack2<Element>(x[0], x[1]), right = pack2<Element>(x[4], x[5]);
      const uint32_t other = __shfl_xor_sync(0xffffffff, odd ? left : right, 1);
      if (at.valid)
        *reinterpret_cast<uint2*>(dst + 16 * j) =
            odd ? make_uint2(other, right) : make_uint2(left, other);
    }
  }
}

// Any rows, any output type, straight from registers; adds weight_prev * out when merging.
template <class Traits>
MAGI_DEVICE void store_direct(const FwdRows<Traits>& me, const float (&o)[Traits::kValueDim / 2],
                              FwdItem item, const float (&weight_prev)[2]) {
  using Element = typename Traits::Element;
  const MagiFwdParams& a = me.p.args;
  if constexpr (Traits::kByItem) {
    if (a.out_dtype != kMagiFp32) return store_rows(me, o, item);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const auto at = me.address_of(me.row + 8 * h, item);
    if (!at.valid) continue;
    const int64_t offset =
        at.token * a.out.stride_token + at.head * a.out.stride_head + 2 * (me.lane & 3);
    if (a.out_dtype != kMagiFp32) {
      Element* dst = static_cast<Element*>(a.out.data) + offset;
#pragma unroll
      for (int j = 0; j < Traits::kValueDim / 8; ++j)
        *reinterpret_cast<uint32_t*>(dst + 8 * j) =
            pack2<Element>(o[4 * j + 2 * h], o[4 * j + 2 * h + 1]);
    } else {
      float* dst = static_cast<float*>(a.out.data) + offset;
#pragma unroll
      for (int j = 0; j < Traits::kValueDim / 8; ++j) {
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

template <class Traits>
MAGI_DEVICE void store_output(const FwdRows<Traits>& me, const float (&o)[Traits::kValueDim / 2],
                              FwdItem item, const float (&weight_prev)[2]) {
  // A whole box, or one that the end of the tensor clips.
  const bool whole = ((me.consumer + 1) * 64 >> me.p.pack_shift) <= item.num_tokens ||
                     (item.out_start + item.num_tokens == me.p.args.num_q &&
                      (me.consumer * 64 >> me.p.pack_shift) < item.num_tokens);
  if (Traits::kStageOut && whole && me.p.args.out_dtype != kMagiFp32)
    store_tma(me, o, item);
  else
    store_direct(me, o, item, weight_prev);
}

// Rows that no slice covers: out = 0, lse = that of the sink, or -inf. One warp per (row, head),
// grid-strided.
template <class Traits>
MAGI_DEVICE void fill_empty_rows(const FwdKernelParams& p, int warp, int num_warps, int lane) {
  const MagiFwdParams& a = p.args;
  if (a.merge) return;
  const int bytes = a.out_dtype == kMagiFp32 ? 4 : 2;
  const int chunks = Traits::kValueDim * bytes / 16;
  for (int range = 0; range < a.num_empty_ranges; ++range) {
    const int begin = a.empty_rows[2 * range], end = a.empty_rows[2 * range + 1];
    for (int64_t x = warp; x < static_cast<int64_t>(end - begin) * a.num_heads_q; x += num_warps) {
      const int64_t row = begin + x / a.num_heads_q, head = x % a.num_heads_q;
      char* out = static_cast<char*>(a.out.data) +
                  (row * a.out.stride_token + head * a.out.stride_head) * bytes;
      if (lane < chunks) reinterpret_cast<int4*>(out)[lane] = make_int4(0, 0, 0, 0);
      if constexpr (Traits::kValueDim > 128)  // a row of fp32 is two chunks a lane
        if (lane + 32 < chunks) reinterpret_cast<int4*>(out)[lane + 32] = make_int4(0, 0, 0, 0);
      if (lane == 0)
        a.lse[row * a.lse_stride_token + head * a.lse_stride_head] = sink_of(a, row, head);
    }
  }
}

}  // namespace magi
