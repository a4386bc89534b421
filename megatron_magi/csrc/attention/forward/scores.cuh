// From the scores of a step to probabilities.
#pragma once
#include "products.cuh"
// Behind the products, whose registers it pins.
#include "capped.cuh"
#include "store.cuh"

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

template <class Traits>
MAGI_DEVICE void scale_output(float (&o)[Traits::kValueDim / 2], const float (&factor)[2]) {
#pragma unroll
  for (int j = 0; j < Traits::kValueDim / 2; ++j) o[j] *= factor[(j >> 1) & 1];
}

// The largest logits that have been told, of the heads of this thread's rows.
template <class Traits>
MAGI_DEVICE void load_told(const FwdRows<Traits>& me, const FwdItem& item, float (&told)[2]) {
  const int unit = me.shared_by_lane0(item.unit) << me.p.pack_shift;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int head = unit + ((me.row + 8 * h) & ((1 << me.p.pack_shift) - 1));
    told[h] = __ldcg(me.p.args.max_logits + head);
  }
}

// Tells the largest of this warp's scores; seen: of this lane's.
template <class Traits>
MAGI_DEVICE void tell_largest(const FwdRows<Traits>& me, const FwdItem& item,
                              const float (&seen)[2], SoftmaxState<true>& state) {
  raise_max_logits(me, me.shared_by_lane0(item), seen);
  float told[2];
  load_told(me, item, told);
#pragma unroll
  for (int h = 0; h < 2; ++h) told[h] = fmaxf(told[h], logit_of<Traits>(me.p, seen[h]));
  know_largest(told, state);
}

// The softmax of a step, in two parts: what overlaps the product in flight, and what when it
// is complete.
template <class Traits>
struct SoftmaxStep {
  using State = SoftmaxState<Traits::kMaxLogits>;
  static constexpr int kScores = Traits::kBlockN / 2, kEarly = Traits::kEarlyScores;
  const FwdRows<Traits>& me;
  const FwdStep& step;
  const FwdItem& item;  // of the step
  int flags, q_slot, k_slot;
  float sum[2][2] = {};

  // Returns whether O must be multiplied by alpha.
  MAGI_DEVICE bool begin(float (&s)[kScores], State& state, float (&alpha)[2]) {
    if constexpr (Traits::kSoftcap) {
      const bool rescale = capped_softmax_step(me, flags, step, s, state, alpha);
      compute_before_wait(state.row_sum[0] + state.row_sum[1], smem_addr(&me.smem.items[0]));
      return rescale;
    }
    const bool rescale = !by_sums() && by_maxima(s, state, alpha);
    if constexpr (!Traits::kBySums) {
      sum[0][0] = state.row_sum[0];
      sum[1][0] = state.row_sum[1];
    }
    exponentiate<0, kEarly>(me.p, s, state, sum);
    // With row_sum, because the assembler sees that exponentials are not negative.
    if constexpr (kEarly > 0)
      compute_before_wait(fmaf(state.row_sum[0], 0x1p-100f, sum[0][0] + sum[1][1]),
                          smem_addr(&me.smem.items[0]));
    return rescale;
  }

  // Scores become packed probabilities; O follows the shift where that moved.
  MAGI_DEVICE void end(float (&s)[kScores], State& state, float (&o)[Traits::kValueDim / 2],
                       uint32_t (&probs)[kScores / 2]) {
    if constexpr (!Traits::kSoftcap) exponentiate<kEarly, kScores>(me.p, s, state, sum);
    pack_probs<typename Traits::Element>(s, probs);
    if constexpr (Traits::kSoftcap) return;
    float sums[2] = {sum[0][0] + sum[0][1], sum[1][0] + sum[1][1]};
    if constexpr (Traits::kBySums) {
      pin_registers(sums);  // or they would be made again on each way
      if (by_sums() && unusual(sums, state)) return mend(s, sums, state, o, probs);
      sums[0] += state.row_sum[0];
      sums[1] += state.row_sum[1];
    }
    state.row_sum[0] = sums[0];
    state.row_sum[1] = sums[1];
  }

 private:
  MAGI_DEVICE bool by_sums() const { return Traits::kBySums && (flags & kStepBySums) != 0; }

  MAGI_DEVICE bool by_maxima(float (&s)[kScores], State& state, float (&alpha)[2]) const {
    const bool first = (flags & kStepFirst) != 0;
    float told[2], seen[2];
    if (Traits::kTellsLargest && first) load_told(me, item, told);
    if (flags & kStepMasked) apply_mask(me, s, me.shared_by_lane0(step));
    if constexpr (Traits::kBySums) limits_of_shifts(me.p, state);
    const bool rescale = follow_maxima(me.p, s, state, alpha, seen);
    if constexpr (Traits::kTellsLargest) {
      if (first)
        know_largest(told, state);
      else
        state.known[0] *= alpha[0], state.known[1] *= alpha[1];
      tell_if_unknown(seen, state);
    } else {
      state.keep(seen);
    }
    return rescale;
  }

  // The scores behind the last item are no one's.
  MAGI_DEVICE void tell_if_unknown(const float (&seen)[2], State& state) const {
    float most[2];
#pragma unroll
    for (int h = 0; h < 2; ++h)
      most[h] = exp2_approx(fmaf(seen[h], me.p.scale_log2, state.minus_shift[h]));
    if (!(flags & kStepEnd) && any_unknown(most, state)) tell_largest(me, item, seen, state);
  }

  MAGI_DEVICE static bool unusual(const float (&sums)[2], const State& state) {
    if constexpr (Traits::kTellsLargest) return any_unknown(sums, state);
    return any_above(sums, kFar);
  }

  // A step by sums that are not as usual (softmax.cuh).
  MAGI_DEVICE void mend(float (&s)[kScores], const float (&sums)[2], State& state,
                        float (&o)[Traits::kValueDim / 2], uint32_t (&probs)[kScores / 2]) const {
    bool fit = true;
    float seen[2];
    if constexpr (Traits::kTellsLargest) fit = scores_of_largest(me.p, s, state, seen);
    if (!fit || any_above(sums, kFar)) {
      float alpha[2];
      if (fit && !any_above(sums, kOverflowing)) {
        lower_far_rows(me.p, s, sums, state, alpha);
      } else {
        remake_scores(me, s, q_slot, k_slot);
        limits_of_shifts(me.p, state);
        follow_maxima(me.p, s, state, alpha, seen);
        finish_softmax(me.p, s, state);
      }
      scale_output<Traits>(o, alpha);
      pack_probs<typename Traits::Element>(s, probs);
    } else {
      state.row_sum[0] += sums[0];
      state.row_sum[1] += sums[1];
    }
    if constexpr (Traits::kTellsLargest) tell_largest(me, item, seen, state);
  }
};

}  // namespace magi
