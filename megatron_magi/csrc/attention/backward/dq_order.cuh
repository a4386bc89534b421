// Deterministic mode: what warp 1 does, which has no other work. It works out ahead what the steps
// wait for and signal, and signals what the threads that add dQ hand over.
//
// A visit takes some loads that depend on each other, so lanes work out one each, for the next 32
// steps (8 at head_dim 256). They lie in a ring of twice as many slots, where the threads that add
// dQ find them, with row groups counted through the heads.
#pragma once
#include <type_traits>

#include "dq_in_order.cuh"

namespace magi {

// Signals steps that the other warps have added. Their notes in shared memory happen before the
// release here, which so orders their additions before whatever the reader of a counter adds. Where
// warp 1 waits, it waits for additions alone and signals all that come meanwhile, so nobody waits
// in a circle.
//
// Each half has 16 lanes, and each of its steps two, for two row groups. Registers are short, so
// what is cheap to make again is.
template <class Traits>
struct BwdHandedSignals {
  using T = Traits;
  const BwdArgs& args;
  uint32_t smem;
  int next = 0;  // this half's first step that has not been signalled

  MAGI_DEVICE BwdHandedSignals(const BwdArgs& args, uint32_t smem) : args(args), smem(smem) {}

  // Signals what there is, up to eight steps of each half.
  MAGI_DEVICE void serve() {
    const int lane = ptx::thread_again() % 32, half = lane / 16;
    const int step = next + lane % 16 / 2;
    const bool is_new = step < ptx::load_acquire_cta(smem + T::kOffAdded + 4 * half);
    const uint32_t lanes = __ballot_sync(0xffffffff, is_new);
    if (lanes == 0) return;
    if (is_new) {
      const bool second = lane & 1;
      const BwdVisit visit = BwdVisits<T>(smem).of(step);
      if (visit.signal & (second ? BwdVisit::kEndsSecond : BwdVisit::kEndsFirst))
        ptx::store_release_gpu(BwdCounters<T>(args, half).counters + visit.row_group + second,
                               visit.signal / BwdVisit::kAllFlags);
    }
    __syncwarp();
    next += __popc(lanes >> (16 * half) & 0xffff) / 2;
  }
  // Serves until both halves have been signalled up to this step.
  MAGI_DEVICE void serve_until(int step) {
    while (!__all_sync(0xffffffff, next >= step)) {
      serve();
      __nanosleep(50);
    }
  }
};

// At head_dim 64 and 256, whose adding threads signal themselves.
template <class Traits>
struct BwdNoSignals {
  MAGI_DEVICE BwdNoSignals(const BwdArgs& /*args*/, uint32_t /*smem*/) {}
  MAGI_DEVICE void serve() {}
};

// Until batch `batch` of visits may be written: who adds has read the one before the last, whose
// slots it takes, or warp 1 has signalled its steps.
template <class Traits, class Signals>
MAGI_DEVICE void wait_for_slots(Signals& signals, uint32_t bars, int batch) {
  using T = Traits;
  if constexpr (T::kHandsOver)
    signals.serve_until((batch - 1) * T::kVisitsAtOnce);
  else
    wait_for(bars + T::kBarVisitsEmpty + 8 * (batch % 2), (batch / 2 + 1) & 1);
}

template <class Traits>
MAGI_DEVICE void bwd_write_visits(const BwdArgs& args, const BwdBlock<Traits>& block, uint32_t smem,
                                  uint8_t* smem_ptr) {
  using T = Traits;
  static_assert(T::kVisitsAtOnce <= 32, "a lane has one");
  constexpr int kServedSteps = 4;  // of the walk, between two looks at what is handed over
  const int lane = threadIdx.x % 32;
  const uint32_t bars = smem + T::kOffBars;
  const BwdTurnLists lists{args.places, args.turns, args.segments};
  std::conditional_t<T::kHandsOver, BwdHandedSignals<T>, BwdNoSignals<T>> signals(args, smem);
  // Lanes without a step work out one that there is, because all serve in between.
  int own_number = block.item.entry_begin, own_q = args.entries[own_number].q_begin, own_head = 0;
  block.walk(args, [&](int n, const BwdEntry& /*entry*/, int number, int q, int head) {
    const int place = n % T::kVisitsAtOnce, batch = n / T::kVisitsAtOnce;
    if (place == lane) own_number = number, own_q = q, own_head = head;
    if (n % kServedSteps == 0) signals.serve();
    if (place + 1 < T::kVisitsAtOnce && n + 1 < block.num_steps) return;
    BwdVisit visit = lists.visit(own_number, args.entries[own_number], own_q, args.descending,
                                 [&] { signals.serve(); });
    visit.row_group += own_head * args.num_row_groups;
    wait_for_slots<T>(signals, bars, batch);
    if (lane <= place)
      reinterpret_cast<BwdVisit*>(smem_ptr + T::kOffVisits)[batch % 2 * T::kVisitsAtOnce + lane] =
          visit;
    ptx::mbar_arrive(bars + T::kBarVisitsFull + 8 * (batch % 2));
  });
  if constexpr (T::kHandsOver) signals.serve_until(block.num_steps);
}

}  // namespace magi
