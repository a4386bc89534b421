// Gradients of received keys, which others take while the launch goes on: added up if the launch
// splits head groups and works on all parts at once, and counted.
#pragma once
#include "elementwise.cuh"
#include "parts.cuh"

namespace magi {

// The consumer threads write a tile's rows of one kv head, as the convert kernel does.
template <class Traits, int kWidth>
MAGI_DEVICE void add_parts(const BwdConvertJob& job, const BwdBlock<Traits>& block, int first_row) {
  constexpr int kLanes = kWidth / 8;
#pragma unroll 1
  for (int i = threadIdx.x - 128; i < block.item.k_rows * kLanes; i += 256)
    convert8<typename Traits::Element>(job, first_row + i / kLanes, block.kv_head, i % kLanes * 8);
}

// Called by both consumer warpgroups when they have stored their sums. Of the blocks that share a
// head group, the last one adds up what all have stored.
template <class Traits>
MAGI_DEVICE void finish_received(const BwdArgs& args, uint32_t smem) {
  using T = Traits;
  const BwdBlock<T> block(args, ptx::load_shared_volatile(smem + T::kOffBlock));
  if (!block.is_received || !BwdPart<T>(args, block).is_last()) return;
  const bool counts = threadIdx.x == 128;
  __syncwarp();
  ptx::bar_sync(kBarEpilogue, 256);  // so that one thread releases what all have stored
  if (args.blocks.num_splits > 1 && args.sums == nullptr) {
    if (counts) {
      const int place = block.kv_head * args.blocks.num_items + block.item_number;
      const int others = ptx::add_acq_rel_gpu(args.parts_stored + place, 1);
      ptx::store_shared(smem + T::kOffBlock, others);
    }
    ptx::bar_sync(kBarEpilogue, 256);
    if (ptx::load_shared_volatile(smem + T::kOffBlock) != args.blocks.num_splits - 1) return;
    const int first_row = block.first_row(args);
    add_parts<T, T::kHeadDim>(args.received_jobs[0], block, first_row);
    add_parts<T, T::kValueDim>(args.received_jobs[1], block, first_row);
    __syncwarp();
    ptx::bar_sync(kBarEpilogue, 256);
  }
  if (counts) ptx::add_release_sys(args.done, 1);
}

}  // namespace magi
