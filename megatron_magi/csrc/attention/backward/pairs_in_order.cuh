// Deterministic mode at head_dim 64: dQ of every second step is added by one thread, when all
// earlier entries have finished the step's row groups.
//
// A thread has the time of two steps for each of its own, and the 24 registers of its warpgroup
// have no room for signals by warp 1 (dq_in_order.cuh): they made this kernel up to 8 % slower. So
// the thread asks for its turn while the tile is not there yet, because the answer takes as long as
// a load from the second-level cache. A tile's row groups are signalled as soon as it has arrived,
// or, where the next tile is there already, after that has been issued; but always before a wait
// that does not pass at once, so that nobody waits in a circle. Two steps of an entry that share a
// row group may be added by different warps. The later one, which signals the row group, then waits
// for the other warp, and that one for earlier steps only.
#pragma once
#include "dq_in_order.cuh"

namespace magi {

template <class Traits>
struct BwdPairSignals {
  const BwdArgs& args;
  int half;
  BwdCounters<Traits> counters;
  uint32_t added;           // for each half of a pair the first step that has not been signalled
  int32_t* last = nullptr;  // first counter of a step that has been issued and not signalled
  int last_signal = 0;

  MAGI_DEVICE BwdPairSignals(const BwdArgs& args, int half, uint32_t smem)
      : args(args), half(half), counters(args, half), added(smem + Traits::kOffAdded) {}

  MAGI_DEVICE bool ready(int step, const BwdVisit& visit) const {
    return counters.ready(visit) && follows(step, visit);
  }
  // Whether the other warp has added what it shares with this step.
  MAGI_DEVICE bool follows(int step, const BwdVisit& visit) const {
    if ((visit.signal & BwdVisit::kContinues) == 0) return true;
    const bool is_own = args.heads_inner && args.heads_per_block % 2 == 0;  // added by this warp
    return is_own || ptx::load_acquire_cta(added + 4 * (1 - half)) >= step;
  }
  MAGI_DEVICE void pending(const BwdVisit& visit) {
    last = counters.counters + visit.row_group;
    last_signal = visit.signal;
  }
  // Signals the step that was issued and has arrived.
  MAGI_DEVICE void signal(int step) {
    if (last == nullptr) return;
    ptx::fence_async_global();
    ptx::store_release_cta(added + 4 * half, step + 1);
    const int number = last_signal / BwdVisit::kAllFlags;
    if (last_signal & BwdVisit::kEndsFirst) ptx::store_release_gpu(last, number);
    if (last_signal & BwdVisit::kEndsSecond) ptx::store_release_gpu(last + 1, number);
    last = nullptr;
  }
};

template <class Traits>
MAGI_DEVICE void bwd_reduce_pairs_in_order(const BwdArgs& args, int num_steps, int half,
                                           uint32_t smem, const uint8_t* meta,
                                           const CUtensorMap* map_dq) {
  using T = Traits;
  static_assert(T::kInPairs && T::kDqParts == 1, "a step's tile is whole");
  const uint32_t bars = smem + T::kOffBars;
  const uint32_t full = bars + T::kBarDqFull + 8 * half, empty = bars + T::kBarDqEmpty + 8 * half;
  const BwdVisits<T> visits(smem);
  BwdPairSignals<T> signals(args, half, smem);
#pragma unroll 1
  for (int n = half, turn = 0; n < num_steps; n += 2, ++turn) {
    if (n % T::kVisitsAtOnce < 2) visits.wait(n);
    const BwdVisit visit = visits.of(n);
    bool is_ready = signals.ready(n, visit);
    while (!is_ready && !ptx::mbar_test_wait(full, turn & 1)) is_ready = signals.ready(n, visit);
    wait_for(full, turn & 1);
    const volatile BwdStepMeta& m =
        *reinterpret_cast<const BwdStepMeta*>(meta + n % T::kMetaSlots * T::kMetaBytes);
    const int q = m.q_tile, head = m.head;
    if (!is_ready) {
      ptx::bulk_wait<0>();
      signals.signal(n - 2);
      while (!signals.ready(n, visit)) {
      }
    }
    ptx::fence_async_global();
    add_dq_tile<T>(half, 0, q, head, smem, map_dq);
    ptx::bulk_wait_read<0>();
    ptx::mbar_arrive(empty);
    if (signals.last != nullptr) {
      ptx::bulk_wait<1>();
      signals.signal(n - 2);
    }
    if (n % T::kVisitsAtOnce >= T::kVisitsAtOnce - 2)  // the batch has been read
      ptx::mbar_arrive(bars + T::kBarVisitsEmpty + 8 * (n / T::kVisitsAtOnce % 2));
    signals.pending(visit);
    if (!ptx::mbar_test_wait(full, (turn + 1) & 1)) {
      ptx::bulk_wait<0>();
      signals.signal(n);
    }
  }
  ptx::bulk_wait<0>();
  signals.signal(num_steps);
}

}  // namespace magi
