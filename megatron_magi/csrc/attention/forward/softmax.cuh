// Masking and online softmax of a step's scores, in registers. Register j of a score fragment is
// row row + 8 * ((j >> 1) & 1) and key 8 * (j >> 2) + 2 * (lane & 3) + (j & 1) of the tile.
#pragma once
#include "rows.cuh"

namespace magi {

// Softcap: scores become tanh of themselves, and softcap is what the softmax multiplies them by in
// place of softmax_scale.
template <int kScores>
MAGI_DEVICE void cap_scores(const FwdKernelParams& p, float (&s)[kScores]) {
#pragma unroll
  for (int j = 0; j < kScores; ++j) s[j] = tanh_approx(s[j] * p.cap_scale);
}

// Hides cells outside the band. Each warp votes which side of the interval cuts its rows: mostly
// one of them, and often none.
template <class Traits>
MAGI_DEVICE void apply_mask(const FwdRows<Traits>& me, float (&s)[Traits::kBlockN / 2], Band band) {
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
      if (8 * (j >> 2) + (j & 1) < begin[(j >> 1) & 1]) s[j] = -INFINITY;
  }
  if (__any_sync(0xffffffff, min(end[0], end[1]) < Traits::kBlockN - 6)) {
#pragma unroll
    for (int j = 0; j < kScores; ++j)
      if (8 * (j >> 2) + (j & 1) >= end[(j >> 1) & 1]) s[j] = -INFINITY;
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

// tanh and exp2 go to the special-function unit, which takes an instruction of a warp in 8 clocks;
// with both, a score costs 16, more than its products do. So some exponentials of the variants with
// softcap are multiply-adds. Their argument x, in [-127, 9], comes as z = (x + 127) / kUnitRange,
// which a saturating multiply-add makes: what is hidden, or below the range, is z = 0, and exactly
// 0. x is a nearest integer, which is added to the exponent, and a rest in [-1/2, 1/2], where the
// polynomial has a relative error of 1.1e-4, an eighteenth of a rounding to bf16.
constexpr float kUnitRange = 136.f, kUnitLow = 127.f;
MAGI_DEVICE float exp2_by_fma(float z) {
  constexpr float kRound = 12582912.f - kUnitLow;  // 1.5 * 2^23: the sum's low bits are an integer
  const float rounded = fmaf(z, kUnitRange, kRound);
  const float rest = fmaf(z, kUnitRange, kRound - rounded);
  const float power = fmaf(fmaf(fmaf(0.0550089329f, rest, 0.242210954f), rest, 0.693282902f), rest,
                           1.f);  // 1 at 0, whose bits the exponent of z = 0 takes away
  return __int_as_float(__float_as_int(power) + (__float_as_int(rounded) << 23));
}

// The largest scores of this thread's two rows. With kFmaExps, nan is the largest.
template <class Traits>
MAGI_DEVICE void largest_scores(const float (&s)[Traits::kBlockN / 2], float (&largest)[2]) {
  const auto larger = [](float a, float b) {
    return Traits::kFmaExps > 0 ? max_or_nan(a, b) : fmaxf(a, b);
  };
  float top[2][2];  // two chains per row, for latency
#pragma unroll
  for (int i = 0; i < 4; ++i) top[i >> 1][i & 1] = s[i];
#pragma unroll
  for (int j = 4; j < Traits::kBlockN / 2; ++j)
    top[(j >> 1) & 1][j & 1] = larger(top[(j >> 1) & 1][j & 1], s[j]);
#pragma unroll
  for (int h = 0; h < 2; ++h) largest[h] = larger(top[h][0], top[h][1]);
}

// exp2_by_fma loses nan, so the sum of a row that sees one becomes nan here. Its largest score is
// that of the others.
template <int kScores>
MAGI_DEVICE void fail_nan(const float (&s)[kScores], float (&top)[2], float (&row_sum)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (top[h] == top[h]) continue;
    row_sum[h] = NAN;
    top[h] = -INFINITY;
#pragma unroll
    for (int j = 2 * h; j < kScores; j += j % 2 == 0 ? 1 : 3) top[h] = fmaxf(top[h], s[j]);
  }
}

// Moves the shifts of rows that saw a score above their limit; `alpha` is then what their
// accumulators must be multiplied by.
template <class Traits>
MAGI_DEVICE void move_shifts(const FwdKernelParams& p, const float (&top)[2],
                             SoftmaxState<Traits::kMaxLogits>& state, float (&alpha)[2]) {
  constexpr float kSlack = 8.f;  // log2
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float seen = quad_max(top[h]);
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

// Turns scores into unnormalised probabilities. Returns whether the accumulators of this warp
// must be multiplied by alpha.
template <class Traits>
MAGI_DEVICE bool softmax_step(const FwdKernelParams& p, float (&s)[Traits::kBlockN / 2],
                              SoftmaxState<Traits::kMaxLogits>& state, float (&alpha)[2]) {
  constexpr int kFmaExps = Traits::kFmaExps;
  constexpr bool kFailNan = kFmaExps > 0;
  float top[2];
  largest_scores<Traits>(s, top);
  if constexpr (Traits::kMaxLogits && !kFailNan) {
    state.top[0] = fmaxf(state.top[0], top[0]);
    state.top[1] = fmaxf(state.top[1], top[1]);
  }
  alpha[0] = alpha[1] = 1.f;
  const bool above = kFailNan ? !(top[0] <= state.limit[0]) || !(top[1] <= state.limit[1])
                              : top[0] > state.limit[0] || top[1] > state.limit[1];
  const bool rescale = __any_sync(0xffffffff, above);
  if (rescale) {
    if constexpr (kFailNan) fail_nan(s, top, state.row_sum);
    move_shifts<Traits>(p, top, state, alpha);
  }
  if constexpr (Traits::kMaxLogits && kFailNan) {
    state.top[0] = fmaxf(state.top[0], top[0]);
    state.top[1] = fmaxf(state.top[1], top[1]);
  }
  [[maybe_unused]] float unit_shift[2];  // of exp2_by_fma
#pragma unroll
  for (int h = 0; h < 2; ++h)
    unit_shift[h] = fmaf(state.minus_shift[h], 1.f / kUnitRange, kUnitLow / kUnitRange);
  const auto exponential = [&](int j, int h) {
    return j * kFmaExps % 6 < kFmaExps  // evenly spread
               ? exp2_by_fma(saturated_fma(s[j], p.scale_unit, unit_shift[h]))
               : exp2_approx(fmaf(s[j], p.scale_log2, state.minus_shift[h]));
  };
  float sum[2][2] = {{state.row_sum[0], 0.f}, {state.row_sum[1], 0.f}};
#pragma unroll
  for (int j = 0; j < Traits::kBlockN / 2; j += 2) {
    const int h = (j >> 1) & 1;
    const float lo = exponential(j, h), hi = exponential(j + 1, h);
    sum[h][0] += lo;
    sum[h][1] += hi;
    s[j] = lo;
    s[j + 1] = hi;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) state.row_sum[h] = sum[h][0] + sum[h][1];
  return rescale;
}

}  // namespace magi
