// Main kernel of the attention backward for sm_90a.
//
// A block owns one tile of 128 keys of one kv head (an item of the work list) and walks all query
// tiles of 64 rows that see it, for every query head of the group, so dK and dV stay in registers
// and are written once: no atomics, no zero fill, no conversion. dQ is added in fp32 to global
// memory.
#pragma once
#include "bwd_dq.cuh"
#include "bwd_load.cuh"
#include "bwd_scores.cuh"

namespace magi {

extern __shared__ __align__(1024) uint8_t bwd_smem[];

// The constant operand of the product that adds stats (see bwd_stat_rows): 64 equal rows, of which
// the first half (8 columns) holds what the parts of a stat are worth; and the second half of the
// stats, zeros. All of it in the plain layout: halves one after the other, rows of 16 bytes.
template <class Traits>
MAGI_DEVICE void write_constants(uint8_t* smem_ptr, int thread, int num_threads) {
  using T = Traits;
  using Element = typename T::Element;
  const auto fill = [&](int offset, uint4 row) {
    for (int i = thread; i < T::kTileQ; i += num_threads)
      *reinterpret_cast<uint4*>(smem_ptr + offset + 16 * i) = row;
  };
  fill(T::kOffWeights,
       {ptx::pack2<Element>(kStatUnit, 1.f), ptx::pack2<Element>(1.f / kStatUnit, 0.f), 0, 0});
  fill(T::kOffWeights + T::kStatHalf, {});
  for (int i = 0; i < 2 * T::kStages; ++i)
    fill(T::kOffStats + i * T::kStatBytes + T::kStatHalf, {});
  ptx::fence_async_shared();
}

template <class Traits>
__global__ __launch_bounds__(Traits::kThreads,
                             1) void bwd_kernel(const __grid_constant__ BwdMaps maps,
                                                const __grid_constant__ BwdArgs args) {
  using T = Traits;
  uint8_t* smem_ptr = bwd_smem;
  const uint32_t smem = ptx::smem_addr(smem_ptr);
  const uint32_t bars = smem + T::kOffBars;
  int* block_slot = reinterpret_cast<int*>(smem_ptr + T::kOffBlock);

  if (threadIdx.x == 0) {
    if (smem % 1024 != 0) __trap();  // swizzled tiles rely on it
    for (int i = 0; i < 2; ++i) {
      ptx::mbar_init(bars + T::kBarQFull + 8 * i, 1);
      ptx::mbar_init(bars + T::kBarQEmpty + 8 * i, 8);
      ptx::mbar_init(bars + T::kBarDoFull + 8 * i, 1);
      ptx::mbar_init(bars + T::kBarDoEmpty + 8 * i, 8);
      ptx::mbar_init(bars + T::kBarDqFull + 8 * i, 4);
      ptx::mbar_init(bars + T::kBarDqEmpty + 8 * i, 1);
    }
    ptx::mbar_init(bars + T::kBarKv, 1);
    ptx::mbar_init_fence();
    // A ticket makes sure that the blocks a block waits for have started.
    *block_slot = T::kDeterministic ? atomicAdd(args.semaphores, 1) : blockIdx.x;
  }
  write_constants<T>(smem_ptr, static_cast<int>(threadIdx.x), T::kThreads);
  __syncthreads();
  const int block_idx = T::kDeterministic ? *block_slot : blockIdx.x;
  const int wg = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);

  if (wg == 0) {
    ptx::setmaxnreg_dec<T::kProducerRegs>();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    const BwdBlock<T> block(args, block_idx);
    if (block.num_steps > 0 && threadIdx.x % 32 == 0) {
      if (warp == 0) bwd_load<T>(args, block, smem, smem_ptr, maps);
      if (warp >= 2)
        bwd_reduce_dq<T>(args, block.num_steps, warp - 2, smem, smem_ptr + T::kOffMeta, &maps.dq);
    }
  } else {
    ptx::setmaxnreg_inc<T::kConsumerRegs>();
    bwd_consume<T>(args, BwdBlock<T>(args, block_idx).num_steps, wg - 1, smem);
  }
}

}  // namespace magi
