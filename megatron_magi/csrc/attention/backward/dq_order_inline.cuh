// Deterministic mode at head_dim 64 and 256: the threads that add dQ signal what they have added
// themselves. With signals by warp 1 (dq_in_order.cuh) the kernels were slower, by up to 8 % at 64
// and by 6 to 18 % at 256. At head_dim 64 a thread adds every second step and has the time of two
// for each, and the 24 registers of its warpgroup have no room for such signals.
//
// The thread asks for its turn while the tile is not there yet, because the answer takes as long as
// a load from the second-level cache. A tile's row groups are signalled as soon as it has arrived,
// or, where the next tile is there already, after that has been issued; but always before a wait
// that does not pass at once, so that nobody waits in a circle. In pairs two steps of an entry that
// share a row group may be added by different warps. The later one, which signals the row group,
// then waits for the other warp, and that one for earlier steps only.
#pragma once
#include "dq_in_order.cuh"

namespace magi {

template <class Traits>
struct BwdOwnSignals {
  const BwdArgs& args;
  int half;
  BwdCounters<Traits> counters;
  uint32_t added;           // for each half of a pair the first step that has not been signalled
  int32_t* last = nullptr;  // first counter of a step that has been issued and not signalled
  int last_signal = 0;

  MAGI_DEVICE BwdOwnSignals(const BwdArgs& args, int half, uint32_t smem)
      : args(args), half(half), counters(args, half), added(smem + Traits::kOffAdded) {}

  MAGI_DEVICE bool ready(int step, const BwdVisit& visit) const {
    return counters.ready(visit) && follows(step, visit);
  }
  // True if the other warp has added what it shares with this step.
  MAGI_DEVICE bool follows(int step, const BwdVisit& visit) const {
    if (!Traits::kInPairs || (visit.signal & BwdVisit::kContinues) == 0) return true;
    const bool is_own =
        args.heads_inner && args.blocks.heads_per_block % 2 == 0;  // added by this warp
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
    if constexpr (Traits::kInPairs) ptx::store_release_cta(added + 4 * half, step + 1);
    const int number = last_signal / BwdVisit::kAllFlags;
    if (last_signal & BwdVisit::kEndsFirst) ptx::store_release_gpu(last, number);
    if (last_signal & BwdVisit::kEndsSecond) ptx::store_release_gpu(last + 1, number);
    last = nullptr;
  }
};

// One half of the columns of all steps, or in pairs every second step, by one thread.
template <class Traits>
MAGI_DEVICE void bwd_reduce_dq_and_signal(const BwdArgs& args, int num_steps, int half,
                                          uint32_t smem, const uint8_t* meta,
                                          const CUtensorMap* map_dq) {
  using T = Traits;
  constexpr int kStride = T::kInPairs ? 2 : 1;
  const uint32_t bars = smem + T::kOffBars;
  const uint32_t full = bars + T::kBarDqFull + 8 * half, empty = bars + T::kBarDqEmpty + 8 * half;
  const BwdVisits<T> visits(smem);
  BwdOwnSignals<T> signals(args, half, smem);
#pragma unroll 1
  for (int n = T::kInPairs ? half : 0, turn = 0; n < num_steps; ++turn) {
    const int part = turn % T::kDqParts;
    if (n % T::kVisitsAtOnce < kStride) visits.wait(n);
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
    ptx::bulk_wait_read<0>();
    ptx::mbar_arrive(empty);
    if (signals.last != nullptr) {
      ptx::bulk_wait<1>();
      signals.signal(n - kStride);
    }
    if (part + 1 < T::kDqParts) continue;
    if (n % T::kVisitsAtOnce >= T::kVisitsAtOnce - kStride)  // the batch has been read
      ptx::mbar_arrive(bars + T::kBarVisitsEmpty + 8 * (n / T::kVisitsAtOnce % 2));
    signals.pending(visit);
    if (!ptx::mbar_test_wait(full, (turn + 1) & 1)) {
      ptx::bulk_wait<0>();
      signals.signal(n);
    }
    n += kStride;
  }
  ptx::bulk_wait<0>();
  signals.signal(num_steps);
}

}  // namespace magi
