// A consumer warpgroup: the loop over the stream of steps (see kernel.cuh).
#pragma once
#include "../device/wgmma.h"
#include "capped.cuh"
#include "store.cuh"

namespace magi {

// S = Q K^T.
template <class Traits>
MAGI_DEVICE void issue_scores(const FwdRows<Traits>& me, float (&s)[Traits::kBlockN / 2],
                              int q_slot, int k_slot) {
  using Product = Wgmma<Traits::kBlockN, typename Traits::Element>;
  constexpr int kPanelSteps = Traits::kPanelSteps;
  const uint64_t q = smem_descriptor<Traits::kPanelCols>(smem_addr(me.smem.q[q_slot][me.consumer]));
  const uint64_t k = smem_descriptor<Traits::kPanelCols>(smem_addr(me.smem.k[k_slot]));
#pragma unroll
  for (int i = 0; i < Traits::kHeadDim / 16; ++i) {
    const int in_panel = i % kPanelSteps * 32, panel = i / kPanelSteps;
    Product::template ss<0, 0>(s, descriptor_plus(q, in_panel + panel * Traits::kQPanelBytes),
                               descriptor_plus(k, in_panel + panel * Traits::kKVPanelBytes),
                               i != 0);
  }
}
// O += P V, or O = P V.
template <class Traits>
MAGI_DEVICE void issue_output(const FwdRows<Traits>& me, float (&o)[Traits::kValueDim / 2],
                              const uint32_t (&probs)[Traits::kBlockN / 4], int v_slot,
                              int accumulate) {
  using Product = Wgmma<Traits::kValueDim, typename Traits::Element>;
  const uint64_t v =
      smem_descriptor<Traits::kPanelCols>(smem_addr(me.smem.v[v_slot]), Traits::kKVPanelBytes);
#pragma unroll
  for (int i = 0; i < Traits::kBlockN / 16; ++i)
    Product::template rs<1>(o, probs + 4 * i, descriptor_plus(v, i * 32 * Traits::kPanelCols),
                            i == 0 ? accumulate : 1);
}

template <class Traits>
MAGI_DEVICE void fwd_consume(const FwdRows<Traits>& me) {
  using T = Traits;
  constexpr int kScores = T::kBlockN / 2, kOuts = T::kValueDim / 2;
  auto& smem = me.smem;
  float o[kOuts], s[kScores];
  uint32_t probs[kScores / 2];
  SoftmaxState<T::kMaxLogits> state;
  state.reset();
  RingPosition<T::kStages> ring_k, ring_v;
  RingPosition<T::kQStages> ring_q;
  int step_slot = 0, item_slot = 0;  // item_slot: of the item whose O is accumulated
  bool started = false;              // false in the first iteration: there is no step g yet
  int accumulate = 0;
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) probs[i] = 0;

  while (true) {
    // 1. S = Q K(g+1)^T, O += P(g) V(g).
    wait_for(smem_addr(&smem.full_k[ring_k.slot]), ring_k.phase);
    const FwdStep& step = smem.steps[step_slot];
    const int flags = me.shared_by_lane0(step.rows.x);
    pin_registers(o);
    wgmma_fence();
    issue_scores(me, s, ring_q.slot, ring_k.slot);
    wgmma_commit();
    if (started) wait_for(smem_addr(&smem.full_v[ring_v.slot]), ring_v.phase);
    wgmma_fence();
    issue_output(me, o, probs, ring_v.slot, accumulate);
    wgmma_commit();
    wgmma_wait<1>();
    pin_registers(s);
    me.release(&smem.empty_k[ring_k.slot]);
    if (flags & kStepLast) me.release(&smem.empty_q[ring_q.slot]);
    ring_k.advance();
    if (flags & kStepLast) ring_q.advance();

    // 2. Softmax of step g+1; a new item first closes the sums of the old one.
    float alpha[2], weight[2] = {0.f, 0.f}, weight_prev[2] = {0.f, 0.f};
    const bool new_item = (flags & (kStepFirst | kStepEnd)) != 0;
    if (new_item) {
      if (started)
        finish_rows(me, me.shared_by_lane0(smem.items[item_slot]), state, weight, weight_prev);
      state.reset();
    }
    bool rescale;
    if constexpr (T::kSoftcap) {
      rescale = capped_softmax_step(me, flags, step, s, state, alpha);
    } else {
      if (flags & kStepMasked) apply_mask(me, s, me.shared_by_lane0(step));
      rescale = softmax_step(me.p, s, state, alpha);
    }
    compute_before_wait(state.row_sum[0] + state.row_sum[1], smem_addr(&smem.items[0]));
    step_slot = step_slot + 1 == T::kStepSlots ? 0 : step_slot + 1;

    // 3. Step g is complete: rescale O, or let it leave.
    wgmma_wait<0>();
    pin_registers(o);
    if (started) {
      me.release(&smem.empty_v[ring_v.slot]);
      ring_v.advance();
    }
    if (rescale || new_item) {
#pragma unroll
      for (int j = 0; j < kOuts; ++j) {
        const int h = (j >> 1) & 1;
        o[j] *= new_item ? weight[h] : alpha[h];
      }
      if (new_item && started) {
        store_output(me, o, me.shared_by_lane0(smem.items[item_slot]), weight_prev);
        item_slot = item_slot + 1 == T::kItemSlots ? 0 : item_slot + 1;
      }
    }
    if (flags & kStepEnd) break;
    accumulate = new_item ? 0 : 1;
    started = true;

    // 4. P(g+1), in place as the A operand of the next product. (Packing beside the product in
    // flight, into other registers, was 7 % slower.)
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i)
      probs[i] = pack2<typename T::Element>(s[2 * i], s[2 * i + 1]);
  }
  if (me.thread == 0) bulk_wait<0>();
}

}  // namespace magi
