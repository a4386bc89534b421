// Main kernel of the attention forward for sm_90a.
//
// Problem: out = softmax(scale * Q K^T | mask) V per head, mask = union of banded rectangles.
// A work item is a query tile, of 64 rows per consumer, and a unit: one head, or `pack` heads. One
// block owns an item from first to last key, so there are no atomics on outputs and the result is
// the same bits in every run. With `pack` > 1 the rows of a tile are tokens x pack query heads of
// one kv head: row = token * pack + head.
//
// Blocks are persistent (one per SM). Items are numbered by kv-head section, then longest first,
// then unit; a block takes item blockIdx.x first and then what the global counter hands out.
//
// Roles: warpgroup 0 = producer (thread 0 loads, load.cuh; warps 1-3 write the rows that no
//        slice covers), warpgroups 1.. = two or three consumers of 64 rows each (consume.cuh,
//        by_item.cuh).
//
// With two Q tiles the consumers see one endless stream of steps (a step = one key tile), across
// items:
//   iteration g:  S = Q K(g+1)^T  |  O += P(g) V(g)  |  maxima of S during the second product
//   then, if step g was the last of its item, O leaves; P(g+1) = exponentials of S, packed as they
//   come into the registers that the second product has read.
// So the next item's first product already runs while the last one's output is written, and the two
// matrix products exist once in the code (nvcc serialises wgmma when they are in several copies).
// The stream begins with a product of nothing (P = 0) and ends with one whose S is not used.
//
// Kernels with one Q tile end an item before they begin the next one (by_item.cuh).
//
// Where Traits::kBySums, most steps take no maxima (softmax.cuh): exponentials stand in their
// place, and K and Q are released after the softmax, because it may ask for the scores again.
//
// Barriers (mbarrier)   arrives                                          waits
//   full_k[]            bytes of K, of Q too in an item's first step     consumers
//   full_v[]            bytes of V                                       consumers
//   empty_q[]           lane 0 of each consumer warp, after the last     producer
//                       Q K^T of the item
//   empty_k/v[]         lane 0 of each consumer warp, product done       producer
// Named barriers: 1.. = output staging of a consumer (128 threads); behind them = its turn (256).
//
// A FwdStep lies next to each K tile. It has 2 * kStages slots: the producer reuses a slot only
// after the K tile kStages later is released, by which time its mask has been applied. A FwdItem
// has kQStages + 2 slots, because an item's output leaves after the first Q K^T of the item behind
// it (which may be a one-step item). With one Q tile, an item's record is written when the Q of the
// item two before it has been released, by when the output of the one three before it has left.
//
// Registers of a consumer thread (head_dim 128), of 160: O 64, S 40, P 20, softmax state 6. Shared
// memory: Q 48 KB, K and V 2 x 20 KB each, output 48 KB.
#pragma once
#include "by_item.cuh"
#include "consume.cuh"
#include "load.cuh"

namespace magi {

template <class Traits>
MAGI_DEVICE void run_consumer(const FwdKernelParams& p, typename Traits::SharedStorage& smem,
                              int consumer) {
  const FwdRows<Traits> me(p, smem, consumer);
  if constexpr (Traits::kByItem)
    FwdItemConsumer<Traits>(me).run();
  else
    fwd_consume(me);
}

template <class Traits>
__global__ __launch_bounds__(Traits::kThreads,
                             1) void fwd_kernel(const __grid_constant__ FwdKernelParams p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  using Storage = typename Traits::SharedStorage;
  Storage& smem = *reinterpret_cast<Storage*>(raw);
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  const int warpgroup = warp / 4;
  if (threadIdx.x == 0) {
    const int consumer_warps = 4 * Traits::kConsumers;
    for (int i = 0; i < Traits::kQStages; ++i) {
      mbar_init(smem_addr(&smem.empty_q[i]), consumer_warps);
    }
    for (int i = 0; i < Traits::kStages; ++i) {
      mbar_init(smem_addr(&smem.full_k[i]), 1);
      mbar_init(smem_addr(&smem.full_v[i]), 1);
      mbar_init(smem_addr(&smem.empty_k[i]), consumer_warps);
      mbar_init(smem_addr(&smem.empty_v[i]), consumer_warps);
    }
    mbar_init_fence();
    if (p.num_items > 0) {
      prefetch_tensor_map(&p.map_q);
      prefetch_tensor_map(&p.map_k);
      prefetch_tensor_map(&p.map_v);
      prefetch_tensor_map(&p.map_out);
    }
  }
  __syncthreads();
  if (warpgroup == 0) {
    setmaxnreg_dec<Traits::kProducerRegs>();
    if (warp == 0) {
      if (elect_one()) FwdProducer<Traits>(p, smem).run();
    } else {
      fill_empty_rows<Traits>(p, blockIdx.x * 3 + warp - 1, gridDim.x * 3, threadIdx.x & 31);
    }
  } else {
    setmaxnreg_inc<Traits::kConsumerRegs>();
    // The address comes out of an exchange, so that the compiler keeps it. It would make it anew
    // for every barrier otherwise, from a special register that is slow to read.
    const uint32_t base = from_lane0(smem_addr(raw));
    Storage& storage = *static_cast<Storage*>(__cvta_shared_to_generic(base));
    if constexpr (Traits::kCapsByPolynomial)
      if (p.unshifted) return run_consumer<Unshifted<Traits>>(p, storage, warpgroup - 1);
    run_consumer<Traits>(p, storage, warpgroup - 1);
  }
}

}  // namespace magi
