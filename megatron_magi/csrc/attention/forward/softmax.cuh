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
  // With kMaxLogits one of these is used. `top`: this lane's largest scores. `known`, with
  // kTellsLargest: the sum of a step up to which no logit is above the largest that was told.
  float top[kMaxLogits ? 2 : 1], known[kMaxLogits ? 2 : 1];
  MAGI_DEVICE void keep(const float (&seen)[2]) {
    if (kMaxLogits)
      top[0] = fmaxf(top[0], seen[0]), top[kMaxLogits] = fmaxf(top[kMaxLogits], seen[1]);
  }
  MAGI_DEVICE void reset() {
    if (kMaxLogits) top[0] = top[kMaxLogits] = -INFINITY;
    if (kMaxLogits) known[0] = known[kMaxLogits] = 0.f;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      minus_shift[h] = 0.f;
      limit[h] = -INFINITY;
      row_sum[h] = 0.f;
    }
  }
};

constexpr float kSlack = 8.f;  // log2
constexpr float kLog2e = 1.44269504089f;

// Lets the shifts follow the maxima of a step's scores; seen: this lane's largest. Returns whether
// the accumulators of this warp must be multiplied by alpha; row_sum has been.
template <int kScores, bool kMaxLogits>
MAGI_DEVICE bool follow_maxima(const FwdKernelParams& p, const float (&s)[kScores],
                               SoftmaxState<kMaxLogits>& state, float (&alpha)[2],
                               float (&seen)[2]) {
  float top[2][2];  // two chains per row, for latency
#pragma unroll
  for (int i = 0; i < 4; ++i) top[i >> 1][i & 1] = s[i];
#pragma unroll
  for (int j = 4; j < kScores; ++j)
    top[(j >> 1) & 1][j & 1] = fmaxf(top[(j >> 1) & 1][j & 1], s[j]);
  seen[0] = fmaxf(top[0][0], top[0][1]);
  seen[1] = fmaxf(top[1][0], top[1][1]);
  alpha[0] = alpha[1] = 1.f;
  const bool rescale = __any_sync(0xffffffff, seen[0] > state.limit[0] || seen[1] > state.limit[1]);
  if (rescale) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float most = quad_max(seen[h]);
      if (most > state.limit[h]) {
        const float minus_shift = -most * p.scale_log2;
        // A row that saw nothing before has sums of 0, which any finite alpha leaves.
        alpha[h] =
            state.limit[h] == -INFINITY ? 0.f : exp2_approx(minus_shift - state.minus_shift[h]);
        state.minus_shift[h] = minus_shift;
        state.limit[h] = most + kSlack * p.inverse_scale_log2;
        state.row_sum[h] *= alpha[h];
      }
    }
  }
  return rescale;
}

// Turns scores kBegin to kEnd into unnormalised probabilities, and adds them to two chains of sums
// per row.
template <int kBegin, int kEnd, int kScores, bool kMaxLogits>
MAGI_DEVICE void exponentiate(const FwdKernelParams& p, float (&s)[kScores],
                              const SoftmaxState<kMaxLogits>& state, float (&sum)[2][2]) {
#pragma unroll
  for (int j = kBegin; j < kEnd; ++j) {
    const int h = (j >> 1) & 1;
    s[j] = exp2_approx(fmaf(s[j], p.scale_log2, state.minus_shift[h]));
    sum[h][j & 1] += s[j];
  }
}

// Probabilities as the A operand of the next product.
template <class Element, int kScores>
MAGI_DEVICE void pack_probs(const float (&s)[kScores], uint32_t (&probs)[kScores / 2]) {
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) probs[i] = pack2<Element>(s[2 * i], s[2 * i + 1]);
}

// All scores of a step, by shifts that have followed the maxima.
template <int kScores, bool kMaxLogits>
MAGI_DEVICE void finish_softmax(const FwdKernelParams& p, float (&s)[kScores],
                                SoftmaxState<kMaxLogits>& state) {
  float sum[2][2] = {{state.row_sum[0], 0.f}, {state.row_sum[1], 0.f}};
  exponentiate<0, kScores>(p, s, state, sum);
#pragma unroll
  for (int h = 0; h < 2; ++h) state.row_sum[h] = sum[h][0] + sum[h][1];
}

// follow_maxima and finish_softmax, where every step takes maxima: scores become unnormalised
// probabilities. Returns as follow_maxima does.
template <int kScores, bool kMaxLogits>
MAGI_DEVICE bool softmax_step(const FwdKernelParams& p, float (&s)[kScores],
                              SoftmaxState<kMaxLogits>& state, float (&alpha)[2]) {
  float seen[2];
  const bool rescale = follow_maxima(p, s, state, alpha, seen);
  state.keep(seen);
  finish_softmax(p, s, state);
  return rescale;
}

// The shift of a row without a finite score, where steps go by sums: exponentials of its first
// ones overflow, so that follow_maxima gives it another.
constexpr float kUnseen = 0x1p120f;

// The limits that belong to the shifts: steps by sums keep the shifts alone.
template <bool kMaxLogits>
MAGI_DEVICE void limits_of_shifts(const FwdKernelParams& p, SoftmaxState<kMaxLogits>& state) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
    state.limit[h] = state.minus_shift[h] == kUnseen
                         ? -INFINITY
                         : (kSlack - state.minus_shift[h]) * p.inverse_scale_log2;
}

// Bounds on the sums of a lane. Above kFar, the scores are far above the shift. Above kOverflowing,
// some may not have fitted: the step is done again. A sum that is nan asks for nothing, because its
// row stays nan.
constexpr float kFar = 1024.f, kOverflowing = 0x1p100f;
MAGI_DEVICE bool any_above(const float (&sums)[2], float bound) {
  return __any_sync(0xffffffff, fmaxf(sums[0], sums[1]) > bound);
}

// Largest logits cost a step by sums nothing, as long as its sums are below the exponential of the
// largest logit known. Threads tell at once what they find, so that all soon know the largest.
constexpr float kSurely = 1.f - 0x1p-18f;  // exponentials err by less
MAGI_DEVICE void know_largest(const float (&logits)[2], SoftmaxState<true>& state) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
    state.known[h] =
        fminf(kFar, exp2_approx(fmaf(logits[h], kLog2e, state.minus_shift[h])) * kSurely);
}
MAGI_DEVICE bool any_unknown(const float (&sums)[2], const SoftmaxState<true>& state) {
  return __any_sync(0xffffffff, !(sums[0] <= state.known[0]) || !(sums[1] <= state.known[1]));
}
// Finds this lane's largest scores of a step by their exponentials, where those of nan do not
// count. False: some have overflowed.
template <int kScores>
MAGI_DEVICE bool scores_of_largest(const FwdKernelParams& p, const float (&s)[kScores],
                                   const SoftmaxState<true>& state, float (&seen)[2]) {
  float most[2][2] = {};  // two chains per row, for latency
#pragma unroll
  for (int j = 0; j < kScores; ++j)
    most[(j >> 1) & 1][j & 1] = fmaxf(most[(j >> 1) & 1][j & 1], s[j]);
  const float row[2] = {fmaxf(most[0][0], most[0][1]), fmaxf(most[1][0], most[1][1])};
  if (__any_sync(0xffffffff, fmaxf(row[0], row[1]) == INFINITY)) return false;
#pragma unroll
  for (int h = 0; h < 2; ++h)
    seen[h] = (__log2f(row[h]) - state.minus_shift[h]) * p.inverse_scale_log2;
  return true;
}

// Lowers the exponentials of rows that are far above their shift, and the shift, by a power of two.
template <int kScores, bool kMaxLogits>
MAGI_DEVICE void lower_far_rows(const FwdKernelParams& p, float (&s)[kScores],
                                const float (&sums)[2], SoftmaxState<kMaxLogits>& state,
                                float (&alpha)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float most = quad_max(sums[h]);
    const float down = most > kFar ? -ceilf(__log2f(most)) : 0.f;
    alpha[h] = exp2_approx(down);
    state.minus_shift[h] += down;
    state.row_sum[h] = (state.row_sum[h] + sums[h]) * alpha[h];
  }
#pragma unroll
  for (int j = 0; j < kScores; ++j) s[j] *= alpha[(j >> 1) & 1];
}

}  // namespace magi
