// The loader, one thread: K and V once, then Q, dO, the stats and what the step is, by TMA.
#pragma once
#include "tile_walk.cuh"

namespace magi {

template <class Traits>
MAGI_DEVICE void write_step_meta(const BwdItem& item, const BwdEntry& entry, int q, int head,
                                 BwdStepMeta& m) {
  using T = Traits;
  const Band band =
      Band{q, entry.q_end, entry.k_lo, entry.k_hi, entry.d_lo, entry.d_hi}.relative_to(
          q, item.k_start);
  const auto is_partial = [&](int first) {
    return band.q_end < T::kTileQ || band.k_start > first || band.k_end < first + 64 ||
           band.d_lo > first - (T::kTileQ - 1) || band.d_hi < first + 63;
  };
  m.q_end = band.q_end;
  m.k_start = band.k_start;
  m.k_end = band.k_end;
  m.d_lo = band.d_lo;
  m.d_hi = band.d_hi;
  m.partial = is_partial(0) | is_partial(64) << 1;
  m.q_tile = q;
  m.head = head;
}

template <class Traits>
MAGI_DEVICE void bwd_load(const BwdArgs& args, const BwdBlock<Traits>& block, uint32_t smem,
                          uint8_t* smem_ptr, const BwdMaps& maps) {
  using T = Traits;
  const uint32_t bars = smem + T::kOffBars;
  const int first_row = block.item.k_start;
  ptx::mbar_arrive_expect_tx(bars + T::kBarKv, T::kKeyBytes + T::kValueBytes);
  ptx::tma_load_4d(smem + T::kOffK, &maps.k, bars + T::kBarKv, 0, first_row, 0, block.kv_head,
                   ptx::kEvictFirst);
  ptx::tma_load_4d(smem + T::kOffV, &maps.v, bars + T::kBarKv, 0, first_row, 0, block.kv_head,
                   ptx::kEvictFirst);
  const auto load_step = [&](int n, const BwdEntry& entry, int /*number*/, int q, int head) {
    const int stage = n % T::kStages;
    const uint32_t parity = (n / T::kStages + 1) & 1;
    const uint32_t q_full = bars + T::kBarQFull + 8 * stage;
    const int do_stage = n % T::kDoStages;
    const uint32_t do_full = bars + T::kBarDoFull + 8 * do_stage;
    const uint32_t stats = smem + T::kOffStats + stage * 2 * T::kStatBytes;
    const int64_t row = static_cast<int64_t>(head) * args.stat_rows + q;
    wait_for(bars + T::kBarQEmpty + 8 * stage, parity);
    write_step_meta<T>(block.item, entry, q, head,
                       *reinterpret_cast<BwdStepMeta*>(smem_ptr + T::kOffMeta +
                                                       n % T::kMetaSlots * T::kMetaBytes));
    ptx::mbar_arrive_expect_tx(q_full, T::kQueryBytes + T::kStatHalf);
    ptx::tma_load_4d(smem + T::kOffQ + stage * T::kQueryBytes, &maps.q, q_full, 0, q, 0, head,
                     ptx::kEvictNormal);
    ptx::bulk_load(stats, args.stats + row, T::kStatHalf, q_full);
    wait_for(bars + T::kBarDoEmpty + 8 * do_stage, (n / T::kDoStages + 1) & 1);
    ptx::mbar_arrive_expect_tx(do_full, T::kDoBytes + T::kStatHalf);
    ptx::tma_load_4d(smem + T::kOffDo + do_stage * T::kDoBytes, &maps.dout, do_full, 0, q, 0, head,
                     ptx::kEvictNormal);
    ptx::bulk_load(stats + T::kStatBytes, args.stats + args.stat_kind_stride + row, T::kStatHalf,
                   do_full);
  };
  if constexpr (!T::kInPairs) {
    block.walk(args, load_step);
    return;
  }
  BwdEntry last{};
  int last_q = 0, last_head = 0;
  block.walk(args, [&](int n, const BwdEntry& entry, int number, int q, int head) {
    load_step(n, entry, number, q, head);
    last = entry, last_q = q, last_head = head;
  });
  if (block.num_whole_steps() > block.num_steps) {  // the last step again, with no visible row
    last.q_end = last_q;
    load_step(block.num_steps, last, 0, last_q, last_head);  // its dQ is dropped
  }
}

}  // namespace magi
