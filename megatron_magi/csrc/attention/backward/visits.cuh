// Deterministic mode: what the steps wait for and signal, worked out by warp 1, which has nothing
// else to do. A visit takes some loads that depend on each other, so lanes work out one each, for
// the next 32 steps (8 at head_dim 256). They lie in a ring of twice as many slots, where the
// threads that add dQ find them, with row groups counted through the heads.
#pragma once
#include "walk.cuh"

namespace magi {

template <class Traits>
MAGI_DEVICE void bwd_write_visits(const BwdArgs& args, const BwdBlock<Traits>& block, uint32_t smem,
                                  uint8_t* smem_ptr) {
  using T = Traits;
  static_assert(T::kVisitsAtOnce <= 32, "a lane has one");
  const int lane = threadIdx.x % 32;
  const uint32_t bars = smem + T::kOffBars;
  const BwdTurnLists lists{args.places, args.turns, args.segments};
  int own_number = 0, own_q = 0, own_head = 0;
  block.walk(args, [&](int n, const BwdEntry& /*entry*/, int number, int q, int head) {
    const int place = n % T::kVisitsAtOnce, batch = n / T::kVisitsAtOnce;
    if (place == lane) own_number = number, own_q = q, own_head = head;
    if (place + 1 < T::kVisitsAtOnce && n + 1 < block.num_steps) return;
    wait_for(bars + T::kBarVisitsEmpty + 8 * (batch % 2), (batch / 2 + 1) & 1);
    if (lane <= place) {
      BwdVisit visit = lists.visit(own_number, args.entries[own_number], own_q, args.descending);
      visit.row_group += own_head * args.num_row_groups;
      reinterpret_cast<BwdVisit*>(smem_ptr + T::kOffVisits)[batch % 2 * T::kVisitsAtOnce + lane] =
          visit;
    }
    ptx::mbar_arrive(bars + T::kBarVisitsFull + 8 * (batch % 2));
  });
}

}  // namespace magi
