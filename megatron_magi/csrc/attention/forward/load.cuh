// The producer, one thread: takes items, and for each step loads K, the step's record, Q where an
// item begins, and the V of the step before.
#pragma once
#include "args.cuh"

namespace magi {

// Kernels that work item by item claim the next one when they have so many steps of an item left to
// load: late, so that blocks with long items do not take more of them than others, and early enough
// to hide the reads of the list. (Those with two Q tiles claim at an item's beginning: they were
// slower this way.)
constexpr int kClaimSteps = 3;

template <class Traits>
struct FwdProducer {
  using Storage = typename Traits::SharedStorage;
  const FwdKernelParams& p;
  Storage& smem;
  RingPosition<Traits::kStages> ring_k, ring_v;
  RingPosition<Traits::kQStages> ring_q;
  int step_slot = 0, item_slot = 0;
  int pending_key = -1, pending_kv_head = 0;  // V tile of the step before
  int next_item = 0;

  MAGI_DEVICE FwdProducer(const FwdKernelParams& params, Storage& storage)
      : p(params), smem(storage) {}

  MAGI_DEVICE void load_pending_v() {
    if (pending_key < 0) return;
    wait_for(smem_addr(&smem.empty_v[ring_v.slot]), ring_v.phase ^ 1);
    const uint32_t bar = smem_addr(&smem.full_v[ring_v.slot]);
    mbar_arrive_expect_tx(bar, Traits::kVBytes);
    tma_load_4d(smem_addr(smem.v[ring_v.slot]), &p.map_v, bar, 0, pending_key, 0, pending_kv_head,
                kEvictLast);
    ring_v.advance();
    if (Traits::kByItem) pending_key = -1;
  }

  // `flags` of the step decide what is loaded: Q too for an item's first step, nothing at the end.
  // With one Q tile, the item before may still need it: the last V of that item goes first, and Q
  // behind K.
  MAGI_DEVICE void push_step(FwdStep step, int key, int kv_head, int q_start, FwdItem item) {
    if (Traits::kByItem && (step.flags() & (kStepFirst | kStepEnd))) load_pending_v();
    wait_for(smem_addr(&smem.empty_k[ring_k.slot]), ring_k.phase ^ 1);
    smem.steps[step_slot] = step;
    step_slot = step_slot + 1 == Traits::kStepSlots ? 0 : step_slot + 1;
    const uint32_t bar = smem_addr(&smem.full_k[ring_k.slot]);
    if (step.flags() & kStepEnd) {
      mbar_arrive(bar);
    } else {
      const bool first = (step.flags() & kStepFirst) != 0;
      if (first) note_item(item);
      mbar_arrive_expect_tx(bar,
                            Traits::kKBytes + (first ? Traits::kConsumers * Traits::kQBytes : 0));
      if (first && !Traits::kByItem) load_q(bar, q_start, item.unit);  // waited for in run_item
      tma_load_4d(smem_addr(smem.k[ring_k.slot]), &p.map_k, bar, 0, key, 0, kv_head, kEvictLast);
      if (first && Traits::kByItem) {
        wait_for_q();
        load_q(bar, q_start, item.unit);
      }
    }
    ring_k.advance();
    load_pending_v();
    pending_key = key;
    pending_kv_head = kv_head;
  }

  MAGI_DEVICE void wait_for_q() const {
    wait_for(smem_addr(&smem.empty_q[ring_q.slot]), ring_q.phase ^ 1);
  }

  // Before the arrival of the item's first step, which orders it for the consumers. The slot is
  // free: see kItemSlots in kernel.cuh.
  MAGI_DEVICE void note_item(FwdItem item) {
    smem.items[item_slot] = item;
    item_slot = item_slot + 1 == Traits::kItemSlots ? 0 : item_slot + 1;
  }

  MAGI_DEVICE void load_q(uint32_t bar, int q_start, int unit) {
    const int tokens = 64 >> p.pack_shift;
#pragma unroll
    for (int c = 0; c < Traits::kConsumers; ++c) {
      const uint32_t dst = smem_addr(smem.q[ring_q.slot][c]);
      const int token = q_start + c * tokens;
      if (p.pack_shift == 0)
        tma_load_4d(dst, &p.map_q, bar, 0, token, 0, unit, kEvictFirst);
      else
        tma_load_5d(dst, &p.map_q, bar, 0, 0, token, 0, unit, kEvictFirst);
    }
    ring_q.advance();
  }

  MAGI_DEVICE void run_item(int item) {
    const int section_items = p.args.num_tiles * p.section_units;
    const int section = item / section_items;
    const int first_unit = section * p.section_units;
    const int units = min(p.section_units, p.num_units - first_unit);
    const int in_section = item - section * section_items;
    const int unit = first_unit + in_section % units;
    const int kv_head = unit / p.units_per_kv;
    const int tile_index = in_section / units;
    const FwdTile tile = reinterpret_cast<const FwdTile*>(p.args.tiles)[tile_index];
    const FwdEntry* entry = reinterpret_cast<const FwdEntry*>(p.args.entries) + tile.entry_begin;
    const FwdItem record = {tile.out_start, tile.num_tokens, unit, tile_index};
    if (!Traits::kByItem) wait_for_q();
    const int claim_at = min(tile.num_steps, kClaimSteps);
    int flags = kStepFirst;
    [[maybe_unused]] bool seen = false;  // all rows have seen keys
    for (int steps_left = tile.num_steps; steps_left > 0; ++entry) {
      const int num_tiles = entry->num_tiles, full_begin = entry->full_begin;
      const int full_end = entry->full_end;
      int key = entry->k_begin;
      for (int j = 0; j < num_tiles; ++j, --steps_left, key += Traits::kBlockN) {
        if (Traits::kByItem && steps_left == claim_at) claim_next();
        if (steps_left == 1) flags |= kStepLast;
        int4 rows = FwdStep::rows_of(flags, {}), keys = rows;
        if (j < full_begin || j >= full_end) {
          const Band band = entry->band.relative_to(tile.q_start, key);
          rows = FwdStep::rows_of(flags | kStepMasked, band);
          keys = FwdStep::keys_of(band);
        } else if constexpr (Traits::kBySums) {
          if (seen) rows.x |= kStepBySums;
          seen = true;
        }
        push_step({rows, keys}, key, kv_head, tile.q_start, record);
        flags = 0;
      }
    }
  }

  MAGI_DEVICE void claim_next() { next_item = atomicAdd(p.args.counter, 1) + gridDim.x; }

  MAGI_DEVICE void run() {
    for (int item = blockIdx.x; item < p.num_items; item = next_item) {
      if (!Traits::kByItem) claim_next();  // used after this item
      run_item(item);
    }
    const int4 end = FwdStep::rows_of(kStepEnd, {});
    push_step({end, end}, -1, 0, 0, {});
    // The last block to come here resets the counters for the next launch.
    __threadfence();
    if (atomicAdd(p.args.counter + 1, 1) == static_cast<int>(gridDim.x) - 1) {
      p.args.counter[0] = 0;
      p.args.counter[1] = 0;
    }
  }
};

}  // namespace magi
