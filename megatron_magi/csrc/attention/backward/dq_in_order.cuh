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

MAGI_DEVICE int load_acquire(const int32_t* ptr) {
  int value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(ptr) : "memory");
  return value;
}
MAGI_DEVICE void store_release(int32_t* ptr, int value) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(ptr), "r"(value) : "memory");
}
MAGI_DEVICE void store_relaxed(int32_t* ptr, int value) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(ptr), "r"(value) : "memory");
}
MAGI_DEVICE int load_acquire_shared(uint32_t addr) {
  int value;
  asm volatile("ld.acquire.cta.shared::cta.b32 %0, [%1];" : "=r"(value) : "r"(addr) : "memory");
  return value;
}
MAGI_DEVICE void store_release_shared(uint32_t addr, int value) {
  asm volatile("st.release.cta.shared::cta.b32 [%0], %1;" ::"r"(addr), "r"(value) : "memory");
}
MAGI_DEVICE int4 load_shared_row(uint32_t addr) {
  int4 row;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(row.x), "=r"(row.y), "=r"(row.z), "=r"(row.w)
               : "r"(addr)
               : "memory");
  return row;
}

// The steps' visits, which warp 1 writes ahead (visits.cuh). Steps are read in order, all of them
// or every second one.
template <class Traits>
struct BwdVisits {
  using T = Traits;
  static constexpr int kStride = T::kInPairs ? 2 : 1;
  uint32_t bars, slots;

  // Until the visit of a step is there. It may be asked again, while the step was not `was_read`.
  MAGI_DEVICE void wait_for_visit(int n) const {
    const int batch = n / T::kVisitsAtOnce;
    wait_for(bars + T::kBarVisitsFull + 8 * (batch % 2), batch / 2 & 1);
  }
  MAGI_DEVICE BwdVisit of(int n) const {
    if (n % T::kVisitsAtOnce < kStride) wait_for_visit(n);
    return read(n);
  }
  MAGI_DEVICE BwdVisit read(int n) const {
    const int4 slot =
        load_shared_row(slots + n % T::kVisitSlots * static_cast<int>(sizeof(BwdVisit)));
    return {slot.x, slot.y, slot.z, slot.w};
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
  using T = Traits;
  const BwdArgs& args;
  int half;
  int32_t* counters;
  uint32_t added;  // for each half the first step that is not known to be added

  MAGI_DEVICE BwdSignals(const BwdArgs& args, int half, uint32_t smem)
      : args(args), half(half), added(smem + T::kOffAdded) {
    const int64_t before = T::kInPairs ? 0 : half * args.num_heads_q;
    counters = args.semaphores + 1 + before * args.num_row_groups;
  }
  MAGI_DEVICE bool ready(int step, const BwdVisit& visit) const {
    const int32_t* counter = counters + visit.row_group;
    return (visit.after_first == 0 || load_acquire(counter) == visit.after_first) &&
           (visit.after_second == 0 || load_acquire(counter + 1) == visit.after_second) &&
           follows(step, visit);
  }
  // Whether the other warp has added what it shares with this step.
  MAGI_DEVICE bool follows(int step, const BwdVisit& visit) const {
    if (!T::kInPairs || (visit.signal & BwdVisit::kContinues) == 0) return true;
    const bool is_own = args.heads_inner && args.heads_per_block % 2 == 0;  // added by this warp
    return is_own || load_acquire_shared(added + 4 * (1 - half)) >= step;
  }
  // Signals a step whose additions are complete.
  //
  // The relaxed store needs no release, although the memory model of PTX asks for one: it says only
  // that this thread sees a completed addition. In hardware, dQ is added in the second-level cache,
  // at the one place that has the address for all SMs, and complete means that it was added there
  // (what comes back is the cache's answer). The store leaves the SM after that. So whoever reads
  // the counter's new value sends its own additions to this place after ours have been there. Their
  // order is all that the counters are for: nothing of dQ is read before the launch has ended. A
  // release would also wait for whatever else this SM has on its way, 1,000 to 1,500 clocks.
  MAGI_DEVICE void signal(int step, const BwdVisit& visit) const {
    ptx::fence_async_global();
    if (T::kInPairs || T::kSignalBy == kSignalHandedOver)
      store_release_shared(added + 4 * half, step + 1);
    if (T::kSignalBy == kSignalHandedOver) return;
    int32_t* counter = counters + visit.row_group;
    if (visit.signal & BwdVisit::kEndsFirst) store(counter, visit);
    if (visit.signal & BwdVisit::kEndsSecond) store(counter + 1, visit);
  }

 private:
  MAGI_DEVICE void store(int32_t* counter, const BwdVisit& visit) const {
    const int number = visit.signal / BwdVisit::kAllFlags;
    if (T::kSignalBy == kSignalRelaxed)
      store_relaxed(counter, number);
    else
      store_release(counter, number);
  }
};

template <class Traits>
MAGI_DEVICE void bwd_reduce_dq_in_order(const BwdArgs& args, int num_steps, int half, uint32_t smem,
                                        const uint8_t* meta, const CUtensorMap* map_dq) {
  using T = Traits;
  constexpr int kStride = BwdVisits<T>::kStride;
  constexpr bool kDeferred = T::kSignalBy == kSignalReleased;
  const uint32_t full = smem + T::kOffBars + T::kBarDqFull + 8 * half;
  const uint32_t empty = smem + T::kOffBars + T::kBarDqEmpty + 8 * half;
  const BwdVisits<T> visits{smem + T::kOffBars, smem + T::kOffVisits};
  const BwdSignals<T> signals(args, half, smem);
  BwdVisit pending{};  // of the step before, if it has not been signalled
  const auto signal_pending = [&](int n) {
    if (pending.signal != 0) signals.signal(n, pending);
    pending.signal = 0;
  };
  bool is_ready = false;
#pragma unroll 1
  for (int n = T::kInPairs ? half : 0, turn = 0; n < num_steps; ++turn) {
    const int part = turn % T::kDqParts;
    const bool is_last_part = part == T::kDqParts - 1;
    const BwdVisit visit = visits.of(n);
    is_ready = is_ready || part > 0 || signals.ready(n, visit);
    while (!is_ready && !is_complete(full, turn & 1)) is_ready = signals.ready(n, visit);
    wait_for(full, turn & 1);
    const volatile BwdStepMeta& m =
        *reinterpret_cast<const BwdStepMeta*>(meta + n % T::kMetaSlots * T::kMetaBytes);
    const int q = m.q_tile, head = m.head;
    if (!is_ready) {
      if constexpr (kDeferred) {
        ptx::bulk_wait<0>();
        signal_pending(n - kStride);
      }
      while (!signals.ready(n, visit)) {
      }
    }
    ptx::fence_async_global();
    add_dq_tile<T>(half, part, q, head, smem, map_dq);
    is_ready = false;
    if (T::kAskWhen == kAskAhead && is_last_part && n + kStride < num_steps)
      is_ready = signals.ready(n + kStride, visits.of(n + kStride));
    ptx::bulk_wait_read<0>();
    ptx::mbar_arrive(empty);
    if (kDeferred && pending.signal != 0) {
      ptx::bulk_wait<1>();
      signal_pending(n - kStride);
    }
    if (is_last_part) {
      visits.was_read(n);
      if (!kDeferred || !is_complete(full, (turn + 1) & 1)) {
        ptx::bulk_wait<0>();
        signals.signal(n, visit);
      } else {
        pending = visit;
      }
      n += kStride;
    }
  }
  ptx::bulk_wait<0>();
  if constexpr (kDeferred) signal_pending(num_steps);
}

// The same by a whole warp: lane 0 adds, and while that is read the lanes ask for the turns of the
// next steps, two lanes for each step's two row groups.
template <class Traits>
struct BwdTurns {
  using T = Traits;
  static constexpr int kStride = BwdVisits<T>::kStride;
  const BwdVisits<T>& visits;
  const BwdSignals<T>& signals;
  int num_steps;

  // The first step of this warp that has not got its turn, if `granted` had not. Steps of one batch
  // of visits are asked for at a time.
  MAGI_DEVICE int ask(int granted) const {
    const int lane = threadIdx.x % 32;
    const int batch_end = (granted / T::kVisitsAtOnce + 1) * T::kVisitsAtOnce;
    const int end = num_steps < batch_end ? num_steps : batch_end;
    const int step = granted + lane / 2 * kStride;
    visits.wait_for_visit(granted);
    bool is_ready = false;
    if (step < end) {
      const BwdVisit visit = visits.read(step);
      const bool second = lane & 1;
      const int after = second ? visit.after_second : visit.after_first;
      is_ready = after == 0 || load_acquire(signals.counters + visit.row_group + second) == after;
      is_ready = is_ready && signals.follows(step, visit);
    }
    const uint32_t lanes = __ballot_sync(0xffffffff, is_ready);
    __syncwarp();  // what any lane has seen happens before the additions of lane 0
    return granted + (lanes == 0xffffffff ? 16 : (__ffs(~lanes) - 1) / 2) * kStride;
  }
};

template <class Traits>
MAGI_DEVICE void bwd_reduce_dq_by_warp(const BwdArgs& args, int num_steps, int half, uint32_t smem,
                                       const uint8_t* meta, const CUtensorMap* map_dq) {
  using T = Traits;
  constexpr int kStride = BwdVisits<T>::kStride;
  const bool adds = threadIdx.x % 32 == 0;
  const uint32_t full = smem + T::kOffBars + T::kBarDqFull + 8 * half;
  const uint32_t empty = smem + T::kOffBars + T::kBarDqEmpty + 8 * half;
  const BwdVisits<T> visits{smem + T::kOffBars, smem + T::kOffVisits};
  const BwdSignals<T> signals(args, half, smem);
  const BwdTurns<T> turns{visits, signals, num_steps};
  int granted = T::kInPairs ? half : 0;
#pragma unroll 1
  for (int n = granted, turn = 0; n < num_steps; ++turn) {
    const int part = turn % T::kDqParts;
    const bool is_last_part = part == T::kDqParts - 1;
    while (granted <= n) granted = turns.ask(granted);
    if (adds) {
      wait_for(full, turn & 1);
      const volatile BwdStepMeta& m =
          *reinterpret_cast<const BwdStepMeta*>(meta + n % T::kMetaSlots * T::kMetaBytes);
      const int q = m.q_tile, head = m.head;
      ptx::fence_async_global();
      add_dq_tile<T>(half, part, q, head, smem, map_dq);
    }
    __syncwarp();
    if (is_last_part && n + kStride < num_steps && granted <= n + kStride)
      granted = turns.ask(granted);
    if (adds) {
      ptx::bulk_wait_read<0>();
      ptx::mbar_arrive(empty);
      if (is_last_part) {
        const BwdVisit visit = visits.read(n);
        ptx::bulk_wait<0>();
        signals.signal(n, visit);
        visits.was_read(n);
      }
    }
    __syncwarp();
    if (is_last_part) n += kStride;
  }
}

}  // namespace magi
