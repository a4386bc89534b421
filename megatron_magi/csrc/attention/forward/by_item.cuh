// A consumer warpgroup that works item by item: the steps of one, its output, then the next one.
//
// With one Q tile, the Q of an item cannot come before the last scores of the item before are made.
// In the stream of consume.cuh the last P V of an item would be issued behind the next item's first
// product and wait for that Q too. Here it does not, and the output leaves while Q comes:
//   first step:  S = Q K(0)^T, softmax, P(0) = S
//   step g:      S = Q K(g)^T  |  O += P(g-1) V(g-1)  |  softmax of S during the second product
//   at the end:  O += P V of the last step; O leaves
//
// A step's loop also has no branch for the end of an item. At head_dim 128 that counts more than a
// second Q tile would.
//
// Where heads are wider than 128, two consumers take turns: one issues its two products, then the
// other one, so that the softmax of each runs during the products of the other. Three keep the
// tensor cores busy without, but for head_dim 64 with softcap.
#pragma once
#include "scores.cuh"
#include "store.cuh"

namespace magi {

template <class Traits>
struct FwdItemConsumer {
  static constexpr int kScores = Traits::kBlockN / 2, kOuts = Traits::kValueDim / 2;
  const FwdRows<Traits>& me;
  typename Traits::SharedStorage& smem;
  float o[kOuts], s[kScores];
  uint32_t probs[kScores / 2];
  float alpha[2];
  bool rescale = false;
  SoftmaxState<Traits::kMaxLogits> state;
  RingPosition<Traits::kStages> ring_k, ring_v;
  int step_slot = 0, item_slot = 0;

  MAGI_DEVICE explicit FwdItemConsumer(const FwdRows<Traits>& rows) : me(rows), smem(rows.smem) {}

  MAGI_DEVICE void run() {
    if (Traits::kTurns && me.consumer == Traits::kConsumers - 1) me.pass_turn();
    while (true) {
      int flags = next_keys();
      if (flags & kStepEnd) break;
      first_step(flags);
      int accumulate = 0;
#pragma unroll 1
      while (!(flags & kStepLast)) {
        flags = next_keys();
        next_step(flags, accumulate);
        accumulate = 1;
      }
      last_output(accumulate);
    }
    if (me.thread == 0) bulk_wait<0>();
  }

  // Waits for the keys of the next step; returns its flags.
  MAGI_DEVICE int next_keys() {
    wait_for(smem_addr(&smem.full_k[ring_k.slot]), ring_k.phase);
    return me.shared_by_lane0(smem.steps[step_slot].rows.x);
  }

  MAGI_DEVICE void first_step(int flags) {
    make_scores();
    wgmma_wait<0>();
    state.reset();
    if (Traits::kBySums) state.minus_shift[0] = state.minus_shift[1] = kUnseen;
#pragma unroll
    for (int j = 0; j < kOuts; ++j) o[j] = 0.f;  // a step may scale it
    auto softmax = begin_softmax(flags);
    end_softmax(softmax, flags);
  }

  MAGI_DEVICE void next_step(int flags, int accumulate) {
    if (Traits::kTurns) me.wait_turn();
    pin_registers(o);
    make_scores();
    add_output(accumulate);
    if (Traits::kTurns) me.pass_turn();
    wgmma_wait<1>();
    auto softmax = begin_softmax(flags);
    wait_for_output();
    if (rescale) scale_output<Traits>(o, alpha);
    end_softmax(softmax, flags);
  }

  MAGI_DEVICE void last_output(int accumulate) {
    pin_registers(o);
    add_output(accumulate);
    float weight[2] = {0.f, 0.f}, weight_prev[2] = {0.f, 0.f};
    const FwdItem item = me.shared_by_lane0(smem.items[item_slot]);
    finish_rows(me, item, state, weight, weight_prev);
    wait_for_output();
    scale_output<Traits>(o, weight);
    store_output(me, o, item, weight_prev);
    item_slot = item_slot + 1 == Traits::kItemSlots ? 0 : item_slot + 1;
  }

  MAGI_DEVICE void make_scores() {
    pin_registers(s);
    wgmma_fence();
    issue_scores(me, s, 0, ring_k.slot);
    wgmma_commit();
  }

  // The scores are made: K may be overwritten, and after an item's last scores Q too.
  MAGI_DEVICE void release_keys(int flags) {
    me.release(&smem.empty_k[ring_k.slot]);
    if (flags & kStepLast) me.release(&smem.empty_q[0]);
    ring_k.advance();
  }

  // The part of a step's softmax that runs during the product in flight. K is left for a second
  // look where the softmax may ask for one.
  MAGI_DEVICE SoftmaxStep<Traits> begin_softmax(int flags) {
    pin_registers(s);
    SoftmaxStep<Traits> step{me,         smem.steps[step_slot], smem.items[item_slot], flags, 0,
                             ring_k.slot};
    if (!Traits::kBySums) release_keys(flags);
    rescale = step.begin(s, state, alpha);
    step_slot = step_slot + 1 == Traits::kStepSlots ? 0 : step_slot + 1;
    return step;
  }
  MAGI_DEVICE void end_softmax(SoftmaxStep<Traits>& step, int flags) {
    step.end(s, state, o, probs);
    if (Traits::kBySums) release_keys(flags);
  }

  MAGI_DEVICE void add_output(int accumulate) {
    wait_for(smem_addr(&smem.full_v[ring_v.slot]), ring_v.phase);
    wgmma_fence();
    issue_output(me, o, probs, ring_v.slot, accumulate);
    wgmma_commit();
  }
  MAGI_DEVICE void wait_for_output() {
    wgmma_wait<0>();
    pin_registers(o);
    me.release(&smem.empty_v[ring_v.slot]);
    ring_v.advance();
  }
};

}  // namespace magi
