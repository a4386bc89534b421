// Deterministic mode: dQ of a step is added when all earlier entries have finished its row groups.
//
// The next block waits from one block's addition to its own: the addition takes some 1,200 clocks
// until it is complete, its signal (a store with release) 1,000 to 1,900, and a look at a counter
// as long as a load from the second-level cache, 700. So the three are apart. A thread adds a tile,
// asks at once whether the next step has its turn, while the tile is read, and notes in shared
// memory what is complete. Warp 1 signals that to the other blocks (dq_order.cuh), because the
// thread would stand still until its release is done. At head_dim 64 and 256 the thread signals
// itself (dq_order_inline.cuh).
//
// The release is needed: with a relaxed store, other blocks saw the signal before the addition,
// although the thread had waited for its completion.
#pragma once
#include "dq.cuh"

namespace magi {

// The steps' visits, which warp 1 writes ahead (dq_order.cuh).
template <class Traits>
struct BwdVisits {
  using T = Traits;
  uint32_t bars, slots;

  MAGI_DEVICE explicit BwdVisits(uint32_t smem)
      : bars(smem + T::kOffBars), slots(smem + T::kOffVisits) {}

  // Until the visit of a step is there.
  MAGI_DEVICE void wait(int n) const {
    const int batch = n / T::kVisitsAtOnce;
    wait_for(bars + T::kBarVisitsFull + 8 * (batch % 2), batch / 2 & 1);
  }
  MAGI_DEVICE BwdVisit of(int n) const {
    const uint4 slot =
        ptx::load_shared_16(slots + n % T::kVisitSlots * static_cast<int>(sizeof(BwdVisit)));
    return {static_cast<int>(slot.x), static_cast<int>(slot.y), static_cast<int>(slot.z),
            static_cast<int>(slot.w)};
  }
};

// Counters of row groups, [H][row groups] for each half of the columns (in pairs, once): the number
// of the entry that finished last.
template <class Traits>
struct BwdCounters {
  int32_t* counters;

  MAGI_DEVICE BwdCounters(const BwdArgs& args, int half) {
    const int64_t before = Traits::kInPairs ? 0 : half * args.num_heads_q;
    counters = args.semaphores + 1 + before * args.num_row_groups;
  }
  // True if the entries before have finished a step's row groups.
  MAGI_DEVICE bool ready(const BwdVisit& visit) const {
    const int32_t* counter = counters + visit.row_group;
    return (visit.after_first == 0 || ptx::load_acquire_gpu(counter) == visit.after_first) &&
           (visit.after_second == 0 || ptx::load_acquire_gpu(counter + 1) == visit.after_second);
  }
};

// One half of the columns of all steps, by one thread.
template <class Traits>
MAGI_DEVICE void bwd_reduce_dq_in_order(const BwdArgs& args, int num_steps, int half, uint32_t smem,
                                        const uint8_t* meta, const CUtensorMap* map_dq) {
  using T = Traits;
  const uint32_t full = smem + T::kOffBars + T::kBarDqFull + 8 * half;
  const uint32_t empty = smem + T::kOffBars + T::kBarDqEmpty + 8 * half;
  const BwdVisits<T> visits(smem);
  const BwdCounters<T> counters(args, half);
  const auto ask = [&](int n) {
    if (n % T::kVisitsAtOnce == 0) visits.wait(n);
    return counters.ready(visits.of(n));
  };
  bool is_ready = ask(0);
#pragma unroll 1
  for (int n = 0, turn = 0; n < num_steps; ++turn) {
    const int part = turn % T::kDqParts;
    const bool is_last_part = part == T::kDqParts - 1;
    while (!is_ready) is_ready = counters.ready(visits.of(n));
    wait_for(full, turn & 1);
    const volatile BwdStepMeta& m =
        *reinterpret_cast<const BwdStepMeta*>(meta + n % T::kMetaSlots * T::kMetaBytes);
    const int q = m.q_tile, head = m.head;
    ptx::fence_async_global();
    add_dq_tile<T>(half, part, q, head, smem, map_dq);
    if (is_last_part && ++n < num_steps) is_ready = ask(n);
    ptx::bulk_wait_read<0>();
    ptx::mbar_arrive(empty);
    if (is_last_part) {
      ptx::bulk_wait<0>();
      ptx::fence_async_global();
      ptx::store_release_cta(smem + T::kOffAdded + 4 * half, n);
    }
  }
}

}  // namespace magi
