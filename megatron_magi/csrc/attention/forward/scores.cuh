// What a step makes of its scores: probabilities.
#pragma once
#include "products.cuh"
// Behind the products, whose registers it pins.
#include "capped.cuh"

namespace magi {

// The scores of this warp's rows once more, with the products of one warp: K and Q are still there.
template <class Traits>
MAGI_DEVICE void remake_scores(const FwdRows<Traits>& me, float (&s)[Traits::kBlockN / 2],
                               int q_slot, int k_slot) {
  constexpr int kCols = Traits::kPanelCols;
  const uint32_t q = smem_addr(me.smem.q[q_slot][me.consumer]);
  const uint32_t k = smem_addr(me.smem.k[k_slot]);
#pragma unroll
  for (int j = 0; j < Traits::kBlockN / 2; ++j) s[j] = 0.f;
#pragma unroll 1  // few registers
  for (int i = 0; i < Traits::kHeadDim / 16; ++i) {
    uint32_t a[4], b[4];
    const int panel = i / Traits::kPanelSteps, chunk = 2 * (i % Traits::kPanelSteps);
    const int row = me.thread / 32 * 16 + (me.lane & 15), key = me.lane / 16 * 8 + (me.lane & 7);
    ldmatrix_x4(
        a, q + panel * Traits::kQPanelBytes + swizzle_offset<kCols>(row, chunk + me.lane / 16));
    const uint32_t keys =
        k + panel * Traits::kKVPanelBytes + swizzle_offset<kCols>(key, chunk + (me.lane / 8 & 1));
#pragma unroll
    for (int n = 0; n < Traits::kBlockN / 16; ++n) {
      ldmatrix_x4(b, keys + n * 16 * 2 * kCols);
      mma_16x8x16<typename Traits::Element>(s + 8 * n, a, b[0], b[1]);
      mma_16x8x16<typename Traits::Element>(s + 8 * n + 4, a, b[2], b[3]);
    }
  }
}

// The softmax of a step: by maxima, or by what its kernel has in place of them. Scores become
// probabilities; each way returns whether O must be multiplied by alpha.
template <class Traits>
struct SoftmaxStep {
  using State = SoftmaxState<Traits::kMaxLogits>;
  static constexpr int kScores = Traits::kBlockN / 2;
  const FwdRows<Traits>& me;
  const FwdStep& step;
  int flags, q_slot, k_slot;

  MAGI_DEVICE bool run(float (&s)[kScores], State& state, float (&alpha)[2]) const {
    if constexpr (Traits::kSoftcap) return capped_softmax_step(me, flags, step, s, state, alpha);
    if (flags & kStepMasked) apply_mask(me, s, me.shared_by_lane0(step));
    if constexpr (Traits::kBySums) return by_sums(s, state, alpha);
    return softmax_step(me.p, s, state, alpha);
  }

  MAGI_DEVICE bool by_sums(float (&s)[kScores], State& state, float (&alpha)[2]) const {
    bool by_maxima = true, rescale = false;
    if (flags & kStepBySums) {
      const float2 sums = softmax_by_sums(me.p, s, state);
      by_maxima = false;
      if (!any_above(sums, kFar)) {
        state.row_sum[0] += sums.x;
        state.row_sum[1] += sums.y;
      } else if (!any_above(sums, kOverflowing)) {
        lower_far_rows(me.p, s, sums, state, alpha);
        rescale = true;
      } else {
        remake_scores(me, s, q_slot, k_slot);
        by_maxima = true;
      }
    }
    if (by_maxima) rescale = softmax_step(me.p, s, state, alpha);
    return rescale;
  }
};

}  // namespace magi
