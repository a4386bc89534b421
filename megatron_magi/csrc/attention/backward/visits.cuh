// Deterministic mode: what the steps wait for and signal, worked out by warp 1, which has nothing
// else to do. A visit takes some loads that depend on each other, so lanes work out one each, for
// the next 32 steps (8 at head_dim 256). They lie in a ring of twice as many slots, where the
// threads that add dQ find them, with row groups counted through the heads.
#pragma once
#include "dq_in_order.cuh"

namespace magi {

// Warp 1 signals steps that the other warps have added: what they hand over in shared memory
// happens before the release here, which so orders their additions for whoever sees the counter.
// It never waits for anything but what they have finished, and writes visits in between.
template <class Traits>
struct BwdHandedSignals {
  using T = Traits;
  static constexpr int kStride = BwdVisits<T>::kStride;
  // 16 lanes for each half, two for a step's two row groups.
  const BwdVisits<T> visits;
  const BwdSignals<T> signals;
  int next;  // this half's first step that has not been signalled

  MAGI_DEVICE BwdHandedSignals(const BwdArgs& args, uint32_t smem)
      : visits{smem + T::kOffBars, smem + T::kOffVisits},
        signals(args, threadIdx.x % 32 / 16, smem),
        next(T::kInPairs ? threadIdx.x % 32 / 16 : 0) {}

  // Signals what there is.
  MAGI_DEVICE void serve() {
    const int lane = threadIdx.x % 16;
    const int end = load_acquire_shared(signals.added + 4 * signals.half);
    const int step = next + lane / 2 * kStride;
    const bool is_new = step < end;
    const uint32_t lanes = __ballot_sync(0xffffffff, is_new);
    if (lanes == 0) return;
    if (is_new) {
      const bool second = lane & 1;
      const BwdVisit visit = visits.read(step);
      if (visit.signal & (second ? BwdVisit::kEndsSecond : BwdVisit::kEndsFirst))
        store_release(signals.counters + visit.row_group + second,
                      visit.signal / BwdVisit::kAllFlags);
    }
    __syncwarp();
    next += __popc(lanes >> (16 * signals.half) & 0xffff) / 2 * kStride;
  }
  // Serves until both halves have been signalled up to this step.
  MAGI_DEVICE void serve_until(int step) {
    while (!__all_sync(0xffffffff, next >= step)) {
      serve();
      __nanosleep(50);
    }
  }
};

template <class Traits>
MAGI_DEVICE void bwd_write_visits(const BwdArgs& args, const BwdBlock<Traits>& block, uint32_t smem,
                                  uint8_t* smem_ptr) {
  using T = Traits;
  static_assert(T::kVisitsAtOnce <= 32, "a lane has one");
  constexpr bool kServes = T::kSignalBy == kSignalHandedOver;
  const int lane = threadIdx.x % 32;
  const uint32_t bars = smem + T::kOffBars;
  const BwdTurnLists lists{args.places, args.turns, args.segments};
  BwdHandedSignals<T> signals(args, smem);
  // Lanes without a step work out one that there is.
  int own_number = block.item.entry_begin, own_q = args.entries[own_number].q_begin, own_head = 0;
  block.walk(args, [&](int n, const BwdEntry& /*entry*/, int number, int q, int head) {
    const int place = n % T::kVisitsAtOnce, batch = n / T::kVisitsAtOnce;
    if (place == lane) own_number = number, own_q = q, own_head = head;
    if (kServes && n % 4 == 0) signals.serve();
    if (place + 1 < T::kVisitsAtOnce && n + 1 < block.num_steps) return;
    BwdVisit visit = lists.visit(own_number, args.entries[own_number], own_q, args.descending, [&] {
      if (kServes) signals.serve();
    });
    visit.row_group += own_head * args.num_row_groups;
    if (kServes)  // their visits are in these slots
      signals.serve_until((batch - 1) * T::kVisitsAtOnce);
    else
      wait_for(bars + T::kBarVisitsEmpty + 8 * (batch % 2), (batch / 2 + 1) & 1);
    if (lane <= place)
      reinterpret_cast<BwdVisit*>(smem_ptr + T::kOffVisits)[batch % 2 * T::kVisitsAtOnce + lane] =
          visit;
    ptx::mbar_arrive(bars + T::kBarVisitsFull + 8 * (batch % 2));
  });
  if (kServes) signals.serve_until(block.num_steps);
}

}  // namespace magi
