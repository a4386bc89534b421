// The softmax of capped logits.
//
// In bf16 and up to a softcap of 55 it has no shift: logits are between minus and plus softcap, and
// bf16 has the exponents of fp32. So there are no maxima, no votes about them and no rescaling. The
// probabilities of fp16 and larger softcaps take the way of plain logits. Where heads are narrow, a
// kernel has a loop for each of the two ways (Unshifted, traits.h).
//
// tanh and the exponential take 8 clocks each of one unit, and every instruction for a score
// counts. So where heads are narrow, a step is capped by the size of its scores: if all are
// smallest, by a short polynomial; if all are small, three quarters of them by a longer one; else
// by tanh.
#pragma once
#include "softmax.cuh"

namespace magi {

MAGI_DEVICE float cap_score(const FwdKernelParams& p, float score) {
  return tanh_approx(score * p.cap_scale) * p.scale_log2;
}

// True for the small scores that a polynomial caps.
MAGI_DEVICE constexpr bool by_polynomial(int j) {
  return (j >> 1) % 4 != 0;
}

// The largest size; scores of nan have none, and stay nan on every way.
template <int kScores>
MAGI_DEVICE float largest_size(const float (&s)[kScores]) {
  float size[2][2] = {};  // chains, for latency
#pragma unroll
  for (int j = 0; j < kScores; ++j) {
    float& most = size[(j >> 1) & 1][j & 1];
    most = fmaxf(most, fabsf(s[j]));
  }
  return fmaxf(fmaxf(size[0][0], size[0][1]), fmaxf(size[1][0], size[1][1]));
}

// Scores to probabilities and their sums. One block of code with the capping, so that the units
// work beside each other.
template <int kScores, class Cap>
MAGI_DEVICE void exponentiate(float (&s)[kScores], float (&sum)[2][2], const Cap& cap) {
#pragma unroll
  for (int j = 0; j < kScores; ++j) {
    s[j] = exp2_approx(cap(j, s[j]));
    sum[(j >> 1) & 1][j & 1] += s[j];
  }
}

// Masked cells have got a probability: 0 takes its place, and the sums are made again.
template <class Traits, int kScores>
MAGI_DEVICE void hide_probabilities(const FwdRows<Traits>& me, Band band, float (&s)[kScores],
                                    float (&sum)[2][2]) {
  apply_mask(me, s, band, 0.f);
#pragma unroll
  for (int h = 0; h < 2; ++h) sum[h][0] = sum[h][1] = 0.f;
#pragma unroll
  for (int j = 0; j < kScores; ++j) sum[(j >> 1) & 1][j & 1] += s[j];
}

// Likewise, by what the largest of this warp's scores allows.
template <int kScores>
MAGI_DEVICE void exponentiate_by_size(const FwdKernelParams& p, float (&s)[kScores],
                                      float (&sum)[2][2]) {
  const float most = largest_size(s);
  if (__all_sync(0xffffffff, most <= p.small_cap.bound))
    exponentiate(s, sum, [&](int, float score) { return p.small_cap.of(score); });
  else if (__all_sync(0xffffffff, most <= p.cap_polynomial.bound))
    exponentiate(s, sum, [&](int j, float score) {
      return by_polynomial(j) ? p.cap_polynomial.of(score) : cap_score(p, score);
    });
  else
    exponentiate(s, sum, [&](int, float score) { return cap_score(p, score); });
}

// The end of a step whose scores are all probabilities.
template <class Traits, int kScores>
MAGI_DEVICE void finish_unshifted(const FwdRows<Traits>& me, int flags, const FwdStep& step,
                                  float (&s)[kScores], float (&sum)[2][2],
                                  SoftmaxState<true>& state) {
  if (flags & kStepMasked) hide_probabilities(me, me.shared_by_lane0(step), s, sum);
#pragma unroll
  for (int h = 0; h < 2; ++h) state.row_sum[h] += sum[h][0] + sum[h][1];
  if (me.p.args.max_logits == nullptr) return;
#pragma unroll
  for (int j = 0; j < kScores; ++j) {
    float& top = state.top[(j >> 1) & 1];
    top = fmaxf(top, s[j]);
  }
}

// softmax_step from scores that are neither capped nor masked.
template <class Traits, int kScores>
MAGI_DEVICE bool capped_softmax_step(const FwdRows<Traits>& me, int flags, const FwdStep& step,
                                     float (&s)[kScores], SoftmaxState<true>& state,
                                     float (&alpha)[2]) {
  if (Traits::kUnshifted ||
      (Traits::kMayBeUnshifted && !Traits::kCapsByPolynomial && me.p.unshifted)) {
    float sum[2][2] = {};
    if constexpr (Traits::kCapsByPolynomial)
      exponentiate_by_size(me.p, s, sum);
    else
      exponentiate(s, sum, [&](int, float score) { return cap_score(me.p, score); });
    finish_unshifted(me, flags, step, s, sum, state);
    alpha[0] = alpha[1] = 1.f;
    return false;
  }
#pragma unroll
  for (int j = 0; j < kScores; ++j) s[j] = tanh_approx(s[j] * me.p.cap_scale);
  if (flags & kStepMasked) apply_mask(me, s, me.shared_by_lane0(step));
  return softmax_step(me.p, s, state, alpha);
}

}  // namespace magi
