// A consumer warpgroup: the loop over the stream of steps (see kernel.cuh).
#pragma once
#include "scores.cuh"
#include "store.cuh"

namespace magi {

// The scores are made: K may be loaded anew, and after the last step of an item Q.
template <class Traits>
MAGI_DEVICE void release_operands(const FwdRows<Traits>& me, int flags,
                                  RingPosition<Traits::kStages>& ring_k,
                                  RingPosition<Traits::kQStages>& ring_q) {
  me.release(&me.smem.empty_k[ring_k.slot]);
  if (flags & kStepLast) me.release(&me.smem.empty_q[ring_q.slot]);
  ring_k.advance();
  if (flags & kStepLast) ring_q.advance();
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
  int step_slot = 0, item_slot = 0;  // item_slot: of the item of the scores
  bool started = false;              // false in the first iteration: there is no step g yet
  int accumulate = 0;
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) probs[i] = 0;

  if constexpr (T::kTurns)
    if (me.consumer == T::kConsumers - 1) me.pass_turn();
  while (true) {
    // 1. S = Q K(g+1)^T, O += P(g) V(g).
    wait_for(smem_addr(&smem.full_k[ring_k.slot]), ring_k.phase);
    const FwdStep& step = smem.steps[step_slot];
    const int flags = me.shared_by_lane0(step.rows.x);
    if constexpr (T::kTurns) me.wait_turn();
    pin_registers(o);
    wgmma_fence();
    issue_scores(me, s, ring_q.slot, ring_k.slot);
    wgmma_commit();
    if (started) wait_for(smem_addr(&smem.full_v[ring_v.slot]), ring_v.phase);
    wgmma_fence();
    issue_output(me, o, probs, ring_v.slot, accumulate);
    wgmma_commit();
    if constexpr (T::kTurns) me.pass_turn();
    wgmma_wait<1>();
    pin_registers(s);
    if constexpr (!T::kBySums) release_operands(me, flags, ring_k, ring_q);

    // 2. The part of the softmax of step g+1 that runs during the product in flight; a new item
    // first closes the sums of the old one.
    float alpha[2], weight[2] = {0.f, 0.f}, weight_prev[2] = {0.f, 0.f};
    const bool new_item = (flags & (kStepFirst | kStepEnd)) != 0;
    if (new_item) {
      if (started) {
        finish_rows(me, me.shared_by_lane0(smem.items[item_slot]), state, weight, weight_prev);
        item_slot = item_slot + 1 == T::kItemSlots ? 0 : item_slot + 1;
      }
      state.reset();
    }
    if (T::kBySums && new_item) state.minus_shift[0] = state.minus_shift[1] = kUnseen;
    SoftmaxStep<T> softmax{me, step, smem.items[item_slot], flags, ring_q.slot, ring_k.slot};
    const bool rescale = softmax.begin(s, state, alpha);
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
        const int left = item_slot == 0 ? T::kItemSlots - 1 : item_slot - 1;
        store_output(me, o, me.shared_by_lane0(smem.items[left]), weight_prev);
      }
    }
    if (flags & kStepEnd) break;
    accumulate = new_item ? 0 : 1;
    started = true;

    // 4. P(g+1), in place as the A operand of the next product, as soon as the exponentials come.
    // (Packing during the product in flight, into other registers, was 7 % slower.)
    softmax.end(s, state, o, probs);
    if constexpr (T::kBySums) release_operands(me, flags, ring_k, ring_q);
  }
  if (me.thread == 0) bulk_wait<0>();
}

}  // namespace magi
