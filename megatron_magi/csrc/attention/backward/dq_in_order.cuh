// Deterministic mode: dQ of a step is added when all earlier entries have finished its row groups.
//
// A whole warp adds each half of the columns (head_dim 64: every second step), where in fast mode
// one thread does. Its lanes work out 32 visits at a time, one each, which takes some loads that
// depend on each other. Lanes 0 and 1 look at the counters of the one or two row groups of a step,
// and lane 0 does the rest.
//
// A tile's row groups are signalled as soon as it has arrived, or, where the next tile is there
// already, after that has been issued; but always before a wait that does not pass at once, so that
// nobody waits in a circle. At head_dim 64 two steps of an entry that share a row group may be
// added by different warps. The later one, which signals the row group, then waits for the other
// warp, and that one for earlier steps only.
#pragma once
#include "dq.cuh"
#include "visit.h"

namespace magi {

MAGI_DEVICE int load_acquire(const int32_t* ptr) {
  int value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(ptr) : "memory");
  return value;
}
MAGI_DEVICE void store_release(int32_t* ptr, int value) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(ptr), "r"(value) : "memory");
}
MAGI_DEVICE int load_acquire_shared(uint32_t addr) {
  int value;
  asm volatile("ld.acquire.cta.shared::cta.b32 %0, [%1];" : "=r"(value) : "r"(addr) : "memory");
  return value;
}
MAGI_DEVICE void store_release_shared(uint32_t addr, int value) {
  asm volatile("st.release.cta.shared::cta.b32 [%0], %1;" ::"r"(addr), "r"(value) : "memory");
}
MAGI_DEVICE void fence_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// The visits of 32 steps of an entry, in walk order, one in each lane. Registers are few here, so
// flags share one with the row group.
struct BwdVisits {
  const BwdArgs& args;
  int entry = -1;  // its number
  int start = 0;   // query row of the first one
  int row_group_flags = 0, after_first = 0, after_second = 0;

  MAGI_DEVICE BwdVisit of(int number, int q) {
    int place = (args.descending ? start - q : q - start) / kBwdTileQ;
    if (number != entry || place < 0 || place >= 32) {
      entry = number, start = q, place = 0;
      load();
    }
    const int shared = __shfl_sync(0xffffffff, row_group_flags, place);
    return {shared / BwdVisit::kAllFlags, __shfl_sync(0xffffffff, after_first, place),
            __shfl_sync(0xffffffff, after_second, place), shared % BwdVisit::kAllFlags};
  }

 private:
  MAGI_DEVICE void load() {
    const int rows = static_cast<int>(threadIdx.x % 32) * kBwdTileQ;
    const int q = args.descending ? start - rows : start + rows;
    const BwdEntry whole = args.entries[entry];
    if (q < whole.q_begin || q >= whole.q_end) return;
    const BwdVisit visit = BwdTurnLists{args.places, args.turns, args.segments}.visit(
        entry, whole, q, args.descending);
    row_group_flags = visit.row_group * BwdVisit::kAllFlags + visit.flags;
    after_first = visit.after_first, after_second = visit.after_second;
  }
};

// Counters of row groups, [2 halves][H][row groups]: the number of the entry that finished last.
template <class Traits>
struct BwdSignals {
  const BwdArgs& args;
  int half;
  uint32_t added;    // for each half of a pair the first step that has not been signalled
  int pending = -1;  // first counter of a step that has been issued and not signalled; -1: none
  int number_flags = 0;

  MAGI_DEVICE int counter(int head, const BwdVisit& visit) const {
    const int heads = Traits::kInPairs ? head : half * args.num_heads_q + head;
    return heads * args.num_row_groups + visit.row_group;
  }
  MAGI_DEVICE bool ready(int step, int head, const BwdVisit& visit) const {
    const int lane = threadIdx.x % 32;
    const int after = lane == 0 ? visit.after_first : lane == 1 ? visit.after_second : 0;
    const bool passes =
        after == 0 || load_acquire(args.semaphores + 1 + counter(head, visit) + lane) == after;
    const bool all = __all_sync(0xffffffff, passes && follows(step, visit));
    __syncwarp();  // lane 0 goes on with what lane 1 has seen
    return all;
  }
  // Whether the other warp has added what it shares with this step.
  MAGI_DEVICE bool follows(int step, const BwdVisit& visit) const {
    if (!Traits::kInPairs || (visit.flags & BwdVisit::kContinues) == 0) return true;
    const bool is_own = args.heads_inner && args.heads_per_block % 2 == 0;  // added by this warp
    return is_own || load_acquire_shared(added + 4 * (1 - half)) >= step;
  }
  MAGI_DEVICE void issued(int head, int entry, const BwdVisit& visit) {
    pending = counter(head, visit);
    number_flags = (entry + 1) * BwdVisit::kAllFlags + visit.flags;
  }
  // Signals the step that was issued, when at most kLater tiles behind it are still on their way.
  template <int kLater>
  MAGI_DEVICE void finish(int step) {
    if (pending < 0) return;
    if (threadIdx.x % 32 == 0) {
      ptx::bulk_wait<kLater>();
      fence_async_global();
      if constexpr (Traits::kInPairs) store_release_shared(added + 4 * half, step + 1);
      int32_t* counters = args.semaphores + 1 + pending;
      const int number = number_flags / BwdVisit::kAllFlags;
      if (number_flags & BwdVisit::kEndsFirst) store_release(counters, number);
      if (number_flags & BwdVisit::kEndsSecond) store_release(counters + 1, number);
    }
    pending = -1;
  }
};

template <class Traits>
MAGI_DEVICE void bwd_reduce_dq_in_order(const BwdArgs& args, int num_steps, int half, uint32_t smem,
                                        const uint8_t* meta, const CUtensorMap* map_dq) {
  using T = Traits;
  constexpr int kStride = T::kInPairs ? 2 : 1;
  const uint32_t full = smem + T::kOffBars + T::kBarDqFull + 8 * half;
  const uint32_t empty = smem + T::kOffBars + T::kBarDqEmpty + 8 * half;
  BwdVisits visits{args};
  BwdSignals<T> signals{args, half, smem + T::kOffAdded};
#pragma unroll 1
  for (int n = T::kInPairs ? half : 0, turn = 0; n < num_steps; ++turn) {
    const int part = turn % T::kDqParts;
    const bool is_last_part = part == T::kDqParts - 1;
    wait_for(full, turn & 1);
    const volatile BwdStepMeta& m =
        *reinterpret_cast<const BwdStepMeta*>(meta + n % T::kMetaSlots * T::kMetaBytes);
    const int q = m.q_tile, head = m.head, entry = m.entry;
    const BwdVisit visit = visits.of(entry, q);
    if (part == 0 && !signals.ready(n, head, visit)) {
      signals.template finish<0>(n - kStride);
      while (!signals.ready(n, head, visit)) {
      }
    }
    if (threadIdx.x % 32 == 0) {
      fence_async_global();
      add_dq_tile<T>(half, part, q, head, smem, map_dq);
      ptx::mbar_arrive(empty);
    }
    signals.template finish<1>(n - kStride);
    if (is_last_part) {
      signals.issued(head, entry, visit);
      const bool is_there = is_complete(full, (turn + 1) & 1);
      if (!__shfl_sync(0xffffffff, is_there, 0)) signals.template finish<0>(n);
      n += kStride;
    }
  }
  if (threadIdx.x % 32 == 0) ptx::bulk_wait<0>();
  // The last step has been signalled, because no tile followed it.
}

}  // namespace magi
