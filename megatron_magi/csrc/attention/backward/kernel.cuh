// Main kernel of the attention backward for sm_90a.
//
// A block owns one tile of 128 keys of one kv head (an item of the work list) and walks all query
// tiles of 64 rows that see it, for every query head of the group, so dK and dV stay in registers
// and are written once: no atomics, no zero fill. A launch can work on a tile in parts: on parts of
// its heads at once, whose sums another kernel adds, or on parts of its heads or rows in turns,
// each of which adds to the sums of those before it (split_tiles.cuh). dQ is added in fp32 to
// global memory by TMA.
//
// Warpgroup 0 gives its registers away: warp 0 loads (load.cuh), warps 2 and 3 add dQ, half of
// the columns each (dq.cuh; in deterministic mode dq_in_order.cuh and dq_order_inline.cuh, where
// warp 1 works out ahead what they wait for and, but at head_dim 64 and 256, signals what they have
// added, dq_order.cuh).
// Warpgroups 1 and 2 own 64 keys each (consume.cuh; head_dim 64 works on two steps at a time,
// consume_hdim64.cuh; at head_dim 256 a tile has 64 keys, and the warpgroups divide the work in
// another way, consume_hdim256.cuh). A step is one query tile of one head. Its operands are 16 bit
// and in shared memory unless marked (r) for registers:
//   1. S^T = K Q^T - lse / scale, dP^T = V dO^T - delta    m64n64; the stats are added as products
//   2. P^T = exp2(scale * S^T), masked      while dP^T runs
//   3. dV += P^T(r) dO                      m64nD, in two parts around the store of dS
//   4. dS^T = P^T * dP^T                    16 bit, to shared memory; both warpgroups meet
//   5. dQ = dS K over all 128 keys          m64n(D/2): half of the columns per warpgroup
//   6. dK += dS^T(r) Q                      m64nD
// Where Traits::kScalesP, P and so dS come multiplied by softmax_scale, and dV is divided by it
// when it leaves; elsewhere dQ and dK are multiplied. With softcap, S^T is the plain product, t =
// tanh(scale / softcap * S^T), P^T = exp2(softcap * log2(e) * t - lse * log2(e)), dS^T = P^T * (1 -
// t^2) * dP^T, and lse is read by the consumers.
//
// dS is double buffered, so one meeting per step is enough: who passes meeting n + 1 knows that
// both have finished reading the dS of step n.
//
// Two facts shape the order (docs/design/backward_kernel.md has the measurements):
// - Shared memory moves 128 bytes a clock, which m64n64 products of two shared operands use up
//   completely. Per step, D = 128, in clocks of shared memory: S, dP, dQ 1536, dV, dK 512, stats
//   128, dS 128, dQ staging 256 + 256, loads 272: 3090, where the tensor cores need 2690.
// - Loads and stores of shared memory stand in one queue, in order, with the products: what is
//   issued after a product waits until that has been handed to the tensor cores. So no warp reads
//   stats: they are three more columns of the products they belong to.
//
// Barriers at head_dim 96 and 128 (b = step % 2)
//                          arrive                                     wait
//   q_full[b], count 1     warp 0 (expect) + TMA: Q, lse stats        consumers, before S
//   do_full[b], 1          warp 0 (expect) + TMA: dO, delta stats     consumers, before dP
//   q_empty[b], 8          consumer warps, after 6                    warp 0
//   do_empty[b], 8         consumer warps, after 3                    warp 0
//   kv, 1                  warp 0 (expect) + TMA, once                consumers
//   dq_full[w], 4          warpgroup w, dQ is in its staging tile     warp 2 + w
//   dq_empty[w], 1         warp 2 + w, the staging tile was read      warpgroup w, before that
//   visits_full[h], 32     warp 1, 32 visits are in half h of a ring  warps 2 and 3 (deterministic)
//   visits_empty[h], 2     warps 2 and 3, have read them              warp 1, before that (64, 256)
// Elsewhere b is the step modulo kStages (Q) or kDoStages (dO), and the ring of steps has
// kMetaSlots. consume_hdim64.cuh, consume_hdim192.cuh and consume_hdim256.cuh name their own
// barriers: ds_full, ds_empty, p_full. Deterministic mode at head_dim 96 to 192: warps 2 and 3
// write to added[w] how many steps they have added, warp 1 signals these, and writes over their
// visits when both have.
//
// Phases follow the step counter n: (n / 2) & 1, for dq n & 1. What a step is (BwdStepMeta) lies in
// a ring of four: warp 0 writes it before q_full, and writes step n + 2 when both consumers have
// left step n, so when warps 2 and 3 have left step n - 1; three steps are in use at most.
//
// Shared memory, D = 128: K 32, V 32, Q 2 x 16, dO 2 x 16, dS 2 x 16, dQ 32, stats 10, rest 1 =
// 203 KiB. Registers of a consumer: dK 64, dV 64, S 32, dP (then dQ) 32, P 16, dS 16 of 232.
// D = 96 is the same with dK, dV 48 and dQ 24 registers. dK and dV need all columns of Q and dO
// behind one descriptor, and half of dQ needs its 48 columns of K behind one: so Q and dO lie in
// three panels of 32 columns (64-byte swizzle), K and V in two of 48, in rows of 128 bytes.
#pragma once
#include "consume.cuh"
#include "consume_hdim192.cuh"
#include "consume_hdim256.cuh"
#include "consume_hdim64.cuh"
#include "dq.cuh"
#include "dq_in_order.cuh"
#include "dq_order.cuh"
#include "dq_order_inline.cuh"
#include "load.cuh"

namespace magi {

extern __shared__ __align__(1024) uint8_t bwd_smem[];

// The constant operand of the product that adds stats (see bwd_stat_rows): 64 equal rows, of which
// the first half (8 columns) holds what the parts of a stat are worth; and the second half of the
// stats, zeros. All of it in the plain layout: halves one after the other, rows of 16 bytes.
template <class Traits>
MAGI_DEVICE void write_constants(uint8_t* smem_ptr) {
  using T = Traits;
  using Element = typename T::Element;
  if (threadIdx.x >= T::kTileQ) return;
  const auto fill = [&](int offset, uint4 row) {
    *reinterpret_cast<uint4*>(smem_ptr + offset + 16 * threadIdx.x) = row;
  };
  fill(T::kOffWeights,
       {ptx::pack2<Element>(kStatHigh, kStatMiddle), ptx::pack2<Element>(kStatLow, 0.f), 0, 0});
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
    for (int i = 0; i < T::kStages; ++i) {
      ptx::mbar_init(bars + T::kBarQFull + 8 * i, 1);
      ptx::mbar_init(bars + T::kBarQEmpty + 8 * i, 8);
      ptx::mbar_init(bars + T::kBarDoFull + 8 * i, 1);
      ptx::mbar_init(bars + T::kBarDoEmpty + 8 * i, 8);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::mbar_init(bars + T::kBarDqFull + 8 * i, 4);
      ptx::mbar_init(bars + T::kBarDqEmpty + 8 * i, 1);
      if (T::kInPairs) ptx::mbar_init(bars + T::kBarDsFull + 8 * i, 8);
      if (T::kDeterministic) {
        ptx::mbar_init(bars + T::kBarVisitsFull + 8 * i, 32);
        ptx::mbar_init(bars + T::kBarVisitsEmpty + 8 * i, 2);
      }
    }
    ptx::mbar_init(bars + T::kBarKv, 1);
    if (T::kWide) ptx::mbar_init(bars + T::kBarDsEmpty, 8);
    if (T::kRelay) {
      ptx::mbar_init(bars + T::kBarDsFull, 4);
      ptx::mbar_init(bars + T::kBarPFull, 4);
    }
    ptx::mbar_init_fence();
    // A ticket makes sure that the blocks a block waits for have started.
    const bool waits = T::kDeterministic || args.sums != nullptr;
    *block_slot = waits ? atomicAdd(args.semaphores, 1) : blockIdx.x;
    if constexpr (T::kDeterministic) {
      int* added = reinterpret_cast<int*>(smem_ptr + T::kOffAdded);
      added[0] = added[1] = 0;
    }
  }
  write_constants<T>(smem_ptr);
  __syncthreads();
  const int block_idx = ptx::load_shared_volatile(smem + T::kOffBlock);
  const int wg = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);

  if (wg == 0) {
    ptx::setmaxnreg_dec<T::kProducerRegs>();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    const BwdBlock<T> block(args, block_idx);
    const uint8_t* meta = smem_ptr + T::kOffMeta;
    if (T::kDeterministic && warp == 1 && block.num_steps > 0)
      bwd_write_visits<T>(args, block, smem, smem_ptr);
    if (block.num_steps > 0 && threadIdx.x % 32 == 0) {
      if (warp == 0) bwd_load<T>(args, block, smem, smem_ptr, maps);
      if (warp >= 2) {
        if constexpr (T::kHandsOver)
          bwd_reduce_dq_in_order<T>(args, block.num_steps, warp - 2, smem, meta, &maps.dq);
        else if constexpr (T::kDeterministic)
          bwd_reduce_dq_and_signal<T>(args, block.num_steps, warp - 2, smem, meta, &maps.dq);
        else
          bwd_reduce_dq<T>(block.num_steps, warp - 2, smem, meta, &maps.dq);
      }
    }
  } else {
    ptx::setmaxnreg_inc<T::kConsumerRegs>();
    // By a shuffle, because what the compiler knows to be uniform takes no register here.
    const int num_steps =
        __shfl_sync(0xffffffff, BwdBlock<T>(args, block_idx).num_whole_steps(), 0);
    if constexpr (T::kInPairs)
      bwd_consume_pairs<T>(args, num_steps, wg - 1, smem);
    else if constexpr (T::kRelay)
      bwd_consume_relay<T>(args, num_steps, wg - 1, smem);
    else if constexpr (T::kWide)
      bwd_consume_wide<T>(args, num_steps, wg - 1, smem);
    else
      bwd_consume<T>(args, num_steps, wg - 1, smem);
  }
}

}  // namespace magi
