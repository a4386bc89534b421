// Tiles that several blocks work on in turns, each with a part of the query heads or of the query
// rows. A block adds its sums to those of the parts before it, and the block of the last part
// writes the gradients. Parts are added in the order in which their blocks start, whoever ends
// first, so the bits are always the same, and a block waits only for blocks that started before it
// (a ticket gives out the numbers of blocks, see kernel.cuh).
#pragma once
#include "tile_walk.cuh"

namespace magi {

template <class Traits>
struct BwdPart : BwdTurnOfPart {
  // Sums lie as the threads hold them: fp32, four at a time, thread after thread.
  float4* sums_of_thread;
  int32_t* taken;  // how many turns the sums have seen

  MAGI_DEVICE BwdPart(const BwdArgs& args, const BwdBlock<Traits>& block) {
    if (Traits::kDeterministic || args.sums == nullptr) return;
    static_cast<BwdTurnOfPart&>(*this) = args.blocks.turn(block, block.item);
    if (count == 1) return;
    constexpr int kFloats = Traits::kTileK * (Traits::kHeadDim + Traits::kValueDim);
    sums_of_thread = args.sums + int64_t{sums} * (kFloats / 4) + (ptx::thread_again() - 128);
    taken = args.parts_stored + sums;
  }

  MAGI_DEVICE bool is_last() const { return turn == count - 1; }

  // Called by both consumer warpgroups.
  MAGI_DEVICE void wait_for_turn() const {
    if (before + turn == 0) return;
    if (ptx::thread_again() == 128) wait_for_count(taken, before + turn);
    __syncwarp();
    ptx::bar_sync(kBarEpilogue, 256);
  }
  // `first` is the first of the thread's fours, and then the one behind the last.
  template <int kCount>
  MAGI_DEVICE void add_sums_to(float (&acc)[kCount], int& first) const {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      const float4 x = sums_of_thread[(first + i) * 256];
      acc[4 * i] += x.x, acc[4 * i + 1] += x.y, acc[4 * i + 2] += x.z, acc[4 * i + 3] += x.w;
    }
    first += kCount / 4;
  }
  template <int kCount>
  MAGI_DEVICE void store_sums(const float (&acc)[kCount], int& first) const {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i)
      sums_of_thread[(first + i) * 256] = {acc[4 * i], acc[4 * i + 1], acc[4 * i + 2],
                                           acc[4 * i + 3]};
    first += kCount / 4;
  }
  // Lets the next part go on, when both consumer warpgroups have read or stored.
  MAGI_DEVICE void end_turn() const {
    __syncwarp();
    ptx::bar_sync(kBarEpilogue, 256);
    if (ptx::thread_again() == 128) ptx::store_release_gpu(taken, before + turn + 1);
  }
};

// Adds what the parts before this one have, and stores the sum for the next one. Returns whether
// there is none, so that the gradients are complete. Called by both consumer warpgroups.
template <class Traits, class... Sums>
MAGI_DEVICE bool take_turn(const BwdArgs& args, const BwdBlock<Traits>& block, Sums&... sums) {
  const BwdPart<Traits> part(args, block);
  if (part.count == 1) return true;
  part.wait_for_turn();
  if (part.turn > 0) {
    int first = 0;
    (part.add_sums_to(sums, first), ...);
  }
  if (!part.is_last()) {
    int first = 0;
    (part.store_sums(sums, first), ...);
  }
  part.end_turn();
  return part.is_last();
}

}  // namespace magi
