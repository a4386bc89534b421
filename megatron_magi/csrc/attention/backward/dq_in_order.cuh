// Deterministic mode: dQ of a step is added when all earlier entries have finished its row groups.
//
// Whether they have is asked while the tile is not there yet, because the answer takes as long as a
// load from the second-level cache. A tile's row groups are signalled as soon as it has arrived,
// or, where the next tile is there already, after that has been issued; but always before a wait
// that does not pass at once, so that nobody waits in a circle. At head_dim 64 two steps of an
// entry that share a row group may be added by different warps. The later one, which signals the
// row group, then waits for the other warp, and that one for earlier steps only.
#pragma once
#include "dq.cuh"

namespace magi {

// The steps' visits, which warp 1 writes ahead (visits.cuh). Steps are read in order, all of them
// or every second one.
template <class Traits>
struct BwdVisits {
  using T = Traits;
  static constexpr int kStride = T::kInPairs ? 2 : 1;
  uint32_t bars, slots;

  MAGI_DEVICE BwdVisit of(int n) const {
    const int batch = n / T::kVisitsAtOnce;
    if (n % T::kVisitsAtOnce < kStride)
      wait_for(bars + T::kBarVisitsFull + 8 * (batch % 2), batch / 2 & 1);
    const uint4 slot =
        ptx::load_shared_16(slots + n % T::kVisitSlots * static_cast<int>(sizeof(BwdVisit)));
    return {static_cast<int>(slot.x), static_cast<int>(slot.y), static_cast<int>(slot.z),
            static_cast<int>(slot.w)};
  }
  MAGI_DEVICE void was_read(int n) const {
    if (n % T::kVisitsAtOnce >= T::kVisitsAtOnce - kStride)
      ptx::mbar_arrive(bars + T::kBarVisitsEmpty + 8 * (n / T::kVisitsAtOnce % 2));
  }
};

// Counters of row groups, [H][row groups] for each half of the columns: the number of the entry
// that finished last.
template <class Traits>
struct BwdSignals {
  const BwdArgs& args;
  int half;
  int32_t* counters;
  uint32_t added;           // for each half of a pair the first step that has not been signalled
  int32_t* last = nullptr;  // first counter of a step that has been issued and not signalled
  int last_signal = 0;

  MAGI_DEVICE BwdSignals(const BwdArgs& args, int half, uint32_t smem)
      : args(args), half(half), added(smem + Traits::kOffAdded) {
    const int64_t before = Traits::kInPairs ? 0 : half * args.num_heads_q;
    counters = args.semaphores + 1 + before * args.num_row_groups;
  }
  MAGI_DEVICE bool ready(int step, const BwdVisit& visit) const {
    const int32_t* counter = counters + visit.row_group;
    return (visit.after_first == 0 || ptx::load_acquire_gpu(counter) == visit.after_first) &&
           (visit.after_second == 0 || ptx::load_acquire_gpu(counter + 1) == visit.after_second) &&
           follows(step, visit);
  }
  // Whether the other warp has added what it shares with this step.
  MAGI_DEVICE bool follows(int step, const BwdVisit& visit) const {
    if (!Traits::kInPairs || (visit.signal & BwdVisit::kContinues) == 0) return true;
    const bool is_own = args.heads_inner && args.heads_per_block % 2 == 0;  // added by this warp
    return is_own || ptx::load_acquire_cta(added + 4 * (1 - half)) >= step;
  }
  MAGI_DEVICE void pending(const BwdVisit& visit) {
    last = counters + visit.row_group;
    last_signal = visit.signal;
  }
  // Signals the step that was issued and has arrived.
  MAGI_DEVICE void signal(int step) {
    if (last == nullptr) return;
    ptx::fence_async_global();
    if constexpr (Traits::kInPairs) ptx::store_release_cta(added + 4 * half, step + 1);
    const int number = last_signal / BwdVisit::kAllFlags;
    if (last_signal & BwdVisit::kEndsFirst) ptx::store_release_gpu(last, number);
    if (last_signal & BwdVisit::kEndsSecond) ptx::store_release_gpu(last + 1, number);
    last = nullptr;
  }
};

template <class Traits>
MAGI_DEVICE void bwd_reduce_dq_in_order(const BwdArgs& args, int num_steps, int half, uint32_t smem,
                                        const uint8_t* meta, const CUtensorMap* map_dq) {
  using T = Traits;
  constexpr int kStride = BwdVisits<T>::kStride;
  const uint32_t full = smem + T::kOffBars + T::kBarDqFull + 8 * half;
  const uint32_t empty = smem + T::kOffBars + T::kBarDqEmpty + 8 * half;
  const BwdVisits<T> visits{smem + T::kOffBars, smem + T::kOffVisits};
  BwdSignals<T> signals(args, half, smem);
#pragma unroll 1
  for (int n = T::kInPairs ? half : 0, turn = 0; n < num_steps; ++turn) {
    const int part = turn % T::kDqParts;
    const bool is_last_part = part == T::kDqParts - 1;
    const BwdVisit visit = visits.of(n);
    bool is_ready = part > 0 || signals.ready(n, visit);
    while (!is_ready && !ptx::mbar_test_wait(full, turn & 1)) is_ready = signals.ready(n, visit);
    wait_for(full, turn & 1);
    const volatile BwdStepMeta& m =
        *reinterpret_cast<const BwdStepMeta*>(meta + n % T::kMetaSlots * T::kMetaBytes);
    const int q = m.q_tile, head = m.head;
    if (!is_ready) {
      ptx::bulk_wait<0>();
      signals.signal(n - kStride);
      while (!signals.ready(n, visit)) {
      }
    }
    ptx::fence_async_global();
    add_dq_tile<T>(half, part, q, head, smem, map_dq);
    ptx::mbar_arrive(empty);
    if (signals.last != nullptr) {
      ptx::bulk_wait<1>();
      signals.signal(n - kStride);
    }
    if (is_last_part) {
      visits.was_read(n);
      signals.pending(visit);
      if (!ptx::mbar_test_wait(full, (turn + 1) & 1)) {
        ptx::bulk_wait<0>();
        signals.signal(n);
      }
      n += kStride;
    }
  }
  ptx::bulk_wait<0>();
  signals.signal(num_steps);
}

}  // namespace magi
