// Masking and online softmax of a step's scores, in registers. Register j of a score fragment is
// row row + 8 * ((j >> 1) & 1) and key 8 * (j >> 2) + 2 * (lane & 3) + (j & 1) of the tile.
#pragma once
#include "../device/wgmma.h"
#include "rows.cuh"

namespace magi {

// Hides cells outside the band. Each warp votes which side of the interval cuts its rows: mostly
// one of them, and often none.
template <class Traits>
MAGI_DEVICE void apply_mask(const FwdRows<Traits>& me, float (&s)[Traits::kBlockN / 2], Band band,
                            float hidden = -INFINITY) {
  constexpr int kScores = Traits::kBlockN / 2;
  // In this thread's numbering: its column j stands at key 8 * (j / 2) + j % 2.
  int begin[2], end[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const Interval visible = band.keys_of((me.row + 8 * h) >> me.p.pack_shift);
    begin[h] = visible.begin - 2 * (me.lane & 3);
    end[h] = visible.end - 2 * (me.lane & 3);
  }
  if (__any_sync(0xffffffff, max(begin[0], begin[1]) > 0)) {
#pragma unroll
    for (int j = 0; j < kScores; ++j)
      if (8 * (j >> 2) + (j & 1) < begin[(j >> 1) & 1]) s[j] = hidden;
  }
  if (__any_sync(0xffffffff, min(end[0], end[1]) < Traits::kBlockN - 6)) {
#pragma unroll
    for (int j = 0; j < kScores; ++j)
      if (8 * (j >> 2) + (j & 1) >= end[(j >> 1) & 1]) s[j] = hidden;
  }
}

MAGI_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
MAGI_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// State of online softmax for this thread's two rows. Scores enter as exp2(scale_log2 * score -
// shift). The shift follows the row's maximum lazily: it moves only when a score is more than
// kSlack above it. exp2(kSlack) is far from any overflow and the final division cancels it, so
// most steps need neither the maximum of the whole row nor any rescaling. All four lanes of a row
// hold the same shift; row_sum is each lane's own part. Source of the idea: conditional rescaling
// in FlashAttention-4.
template <bool kMaxLogits>
struct SoftmaxState {
  float minus_shift[2], limit[2], row_sum[2];
  float top[kMaxLogits ? 2 : 1];  // this lane's largest scores, where they are asked for
  MAGI_DEVICE void reset() {
    if (kMaxLogits) top[0] = top[kMaxLogits] = -INFINITY;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      minus_shift[h] = 0.f;
      limit[h] = -INFINITY;
      row_sum[h] = 0.f;
    }
  }
};

constexpr float kSlack = 8.f;  // log2

// Turns scores into unnormalised probabilities. Returns whether the accumulators of this warp
// must be multiplied by alpha.
template <int kScores, bool kMaxLogits>
MAGI_DEVICE bool softmax_step(const FwdKernelParams& p, float (&s)[kScores],
                              SoftmaxState<kMaxLogits>& state, float (&alpha)[2]) {
  float top[2][2];  // two chains per row, for latency
#pragma unroll
  for (int i = 0; i < 4; ++i) top[i >> 1][i & 1] = s[i];
#pragma unroll
  for (int j = 4; j < kScores; ++j)
    top[(j >> 1) & 1][j & 1] = fmaxf(top[(j >> 1) & 1][j & 1], s[j]);
  const float top0 = fmaxf(top[0][0], top[0][1]), top1 = fmaxf(top[1][0], top[1][1]);
  if constexpr (kMaxLogits) {
    state.top[0] = fmaxf(state.top[0], top0);
    state.top[1] = fmaxf(state.top[1], top1);
  }
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

// The shift of a row without a finite score, where steps go by sums: exponentials of its first
// ones overflow, so that softmax_step gives it another.
constexpr float kUnseen = 0x1p120f;

// softmax_step without maxima, for rows that have a shift: the exponentials themselves say whether
// the scores are still near it. Returns their sums, which row_sum lacks as yet.
template <int kScores, bool kMaxLogits>
MAGI_DEVICE float2 softmax_by_sums(const FwdKernelParams& p, float (&s)[kScores],
                                   SoftmaxState<kMaxLogits>& state) {
  if constexpr (kMaxLogits) {
#pragma unroll
    for (int j = 0; j < kScores; ++j)
      state.top[(j >> 1) & 1] = fmaxf(state.top[(j >> 1) & 1], s[j]);
    pin_registers(state.top);
  }
  float sum[2][2] = {};
#pragma unroll
  for (int j = 0; j < kScores; ++j) {
    const int h = (j >> 1) & 1;
    s[j] = exp2_approx(fmaf(s[j], p.scale_log2, state.minus_shift[h]));
    sum[h][j & 1] += s[j];
  }
  return {sum[0][0] + sum[0][1], sum[1][0] + sum[1][1]};
}

// Bounds on the sums of a lane. Above kFar, the scores are far above the shift. Above kOverflowing,
// some may not have fitted: the step is done again. A sum that is nan asks for nothing, because its
// row stays nan.
constexpr float kFar = 1024.f, kOverflowing = 0x1p100f;
MAGI_DEVICE bool any_above(float2 sums, float bound) {
  return __any_sync(0xffffffff, fmaxf(sums.x, sums.y) > bound);
}

// Lowers the exponentials of rows that are far above their shift, and the shift, by a power of two.
template <int kScores, bool kMaxLogits>
MAGI_DEVICE void lower_far_rows(const FwdKernelParams& p, float (&s)[kScores], float2 sums,
                                SoftmaxState<kMaxLogits>& state, float (&alpha)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = h == 0 ? sums.x : sums.y;
    const float most = quad_max(sum);
    const float down = most > kFar ? -ceilf(__log2f(most)) : 0.f;
    alpha[h] = exp2_approx(down);
    state.minus_shift[h] += down;
    state.limit[h] -= down * p.inverse_scale_log2;
    state.row_sum[h] = (state.row_sum[h] + sum) * alpha[h];
  }
#pragma unroll
  for (int j = 0; j < kScores; ++j) s[j] *= alpha[(j >> 1) & 1];
}

}  // namespace magi
