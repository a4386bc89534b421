// The PTX instructions the attention kernels use, one small function each; those that multiply
// stand in wgmma.h, and no other file has inline assembly. Nothing here knows about attention.
// sm_90a only. All shared-memory addresses are 32-bit (`smem_addr`).
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#define MAGI_DEVICE __device__ __forceinline__

namespace magi::ptx {

using bf16 = __nv_bfloat16;
using fp16 = __half;

MAGI_DEVICE uint32_t smem_addr(const void* ptr) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(ptr));
}

// ---- mbarrier: phases are parities; waiting for parity 1 on a fresh barrier passes at once.

MAGI_DEVICE void mbar_init(uint32_t bar, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
// Makes the inits of this thread visible to the async proxy (and to the cluster).
MAGI_DEVICE void mbar_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
MAGI_DEVICE void mbar_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
MAGI_DEVICE void mbar_arrive_expect_tx(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}
MAGI_DEVICE bool mbar_try_wait(uint32_t bar, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
      : "=r"(done)
      : "r"(bar), "r"(parity)
      : "memory");
  return done != 0;
}
MAGI_DEVICE void mbar_wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{.reg .pred p;\n"
      "WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\n"
      "bra WAIT;\n"
      "DONE: }" ::"r"(bar),
      "r"(parity)
      : "memory");
}
// True if the phase has completed. Never suspends the thread, as mbar_try_wait may, so that it can
// do something else meanwhile.
MAGI_DEVICE bool mbar_test_wait(uint32_t bar, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;"
      " selp.u32 %0, 1, 0, p;}"
      : "=r"(done)
      : "r"(bar), "r"(parity)
      : "memory");
  return done != 0;
}

// ---- numbers by which threads and blocks tell each other. Who has read a released number with
// acquire sees what was written before it.

// In global memory, among the blocks of a GPU.
MAGI_DEVICE int load_acquire_gpu(const int32_t* ptr) {
  int value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(ptr) : "memory");
  return value;
}
MAGI_DEVICE void store_release_gpu(int32_t* ptr, int value) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(ptr), "r"(value) : "memory");
}
// Returns the number before. Whoever adds sees what all who added earlier had written.
MAGI_DEVICE int add_acq_rel_gpu(int32_t* ptr, int value) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(ptr), "r"(value)
               : "memory");
  return before;
}
// Among the threads of a block, in shared memory.
MAGI_DEVICE int load_acquire_cta(uint32_t addr) {
  int value;
  asm volatile("ld.acquire.cta.shared::cta.b32 %0, [%1];" : "=r"(value) : "r"(addr) : "memory");
  return value;
}
MAGI_DEVICE void store_release_cta(uint32_t addr, int value) {
  asm volatile("st.release.cta.shared::cta.b32 [%0], %1;" ::"r"(addr), "r"(value) : "memory");
}

// ---- shared memory by its 32-bit address: pointers cost registers, and these loads and stores
// stay where they stand among products and barriers

MAGI_DEVICE float load_shared_float(uint32_t addr) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(addr) : "memory");
  return x;
}
// 16 bytes; the address is a multiple of 16.
MAGI_DEVICE uint4 load_shared_16(uint32_t addr) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(addr)
               : "memory");
  return x;
}
// Of what other threads write with ordinary stores: never merged with another load.
MAGI_DEVICE int load_shared_volatile(uint32_t addr) {
  int x;
  asm volatile("ld.volatile.shared.s32 %0, [%1];" : "=r"(x) : "r"(addr) : "memory");
  return x;
}
// Likewise 16 bytes, to an `x` that keeps its value where a thread does not load.
MAGI_DEVICE void load_shared_volatile_16(uint32_t addr, int4& x) {
  asm volatile("ld.volatile.shared.v4.s32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(addr)
               : "memory");
}
// The address is a multiple of the size.
MAGI_DEVICE void store_shared(uint32_t addr, int x) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(addr), "r"(x) : "memory");
}
MAGI_DEVICE void store_shared(uint32_t addr, float2 x) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(addr), "f"(x.x), "f"(x.y) : "memory");
}
MAGI_DEVICE void store_shared(uint32_t addr, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(addr), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w)
               : "memory");
}

// ---- what the hardware tells a thread

// threadIdx.x, read anew at each call: where registers are short, what is cheap to make again is
// made again in every step. `volatile` keeps the compiler from hoisting it out of the loop.
MAGI_DEVICE int thread_again() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
// True in one thread of the warp.
MAGI_DEVICE bool elect_one() {
  uint32_t elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(elected));
  return elected != 0;
}
// The GPU's clock in nanoseconds; only differences mean something.
MAGI_DEVICE uint64_t global_timer() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// ---- named barriers (0 is __syncthreads) and register budgets

MAGI_DEVICE void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Counts for the threads that wait there, and does not wait.
MAGI_DEVICE void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
template <int kRegs>
MAGI_DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegs));
}
template <int kRegs>
MAGI_DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegs));
}

// ---- proxies and bulk groups

// Orders this thread's generic shared-memory writes before later wgmma/TMA reads of them
// (a barrier must follow so that the issuing thread is ordered too).
MAGI_DEVICE void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Likewise for global memory, whoever wrote it: what this thread has seen, its later TMA reads see.
MAGI_DEVICE void fence_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
MAGI_DEVICE void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// At most kPending groups of this thread have yet to be read from shared memory.
template <int kPending>
MAGI_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// At most kPending groups of this thread are unfinished (writes visible to it).
template <int kPending>
MAGI_DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- TMA. L2 policies are the encoded 64-bit createpolicy values.

constexpr uint64_t kEvictNormal = 0x1000000000000000ull;
constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;
constexpr uint64_t kEvictLast = 0x14F0000000000000ull;

MAGI_DEVICE void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
MAGI_DEVICE void tma_load_4d(uint32_t dst, const CUtensorMap* map, uint32_t bar, int c0, int c1,
                             int c2, int c3, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3,%4,%5,%6}], [%2], %7;" ::"r"(dst),
      "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(policy)
      : "memory");
}
MAGI_DEVICE void tma_load_5d(uint32_t dst, const CUtensorMap* map, uint32_t bar, int c0, int c1,
                             int c2, int c3, int c4, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3,%4,%5,%6,%7}], [%2], %8;" ::"r"(dst),
      "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(policy)
      : "memory");
}
// Contiguous copy of `bytes` (multiple of 16, both addresses 16-byte aligned) to shared memory.
MAGI_DEVICE void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(dst),
      "l"(src), "r"(bytes), "r"(bar)
      : "memory");
}
// Stores and reduces are clipped at the tensor's end only. A box that starts at a negative
// coordinate traps, so callers clamp.
MAGI_DEVICE void tma_store_4d(const CUtensorMap* map, uint32_t src, int c0, int c1, int c2,
                              int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2,%3,%4,%5}], [%1];" ::"l"(
          map),
      "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
MAGI_DEVICE void tma_store_5d(const CUtensorMap* map, uint32_t src, int c0, int c1, int c2, int c3,
                              int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2,%3,%4,%5,%6}], [%1];" ::
          "l"(map),
      "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
MAGI_DEVICE void tma_reduce_add_4d(const CUtensorMap* map, uint32_t src, int c0, int c1, int c2,
                                   int c3) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group"
      " [%0, {%2,%3,%4,%5}], [%1];" ::"l"(map),
      "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// ---- matrices between registers and shared memory

// Byte offset of 16-byte chunk `chunk` of row `row` in a panel of 64 or 32 columns.
template <int kPanelCols = 64>
MAGI_DEVICE uint32_t swizzle_offset(uint32_t row, uint32_t chunk) {
  static_assert(kPanelCols == 64 || kPanelCols == 32, "rows of 128 or 64 bytes");
  if constexpr (kPanelCols == 64)
    return row * 128 + ((chunk ^ (row & 7)) << 4);
  else
    return row * 64 + ((chunk ^ (row >> 1 & 3)) << 4);
}
MAGI_DEVICE void stmatrix_x4(uint32_t dst, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(dst), "r"(r0),
               "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// Four 8x8 matrices of 16-bit values: lane i gives the address of row i % 8 of matrix i / 8.
MAGI_DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t src) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(src)
               : "memory");
}

// The product of one warp: d[16, 8] += a[16, 16] b[16, 8], fp32 accumulators, both operands of
// Element. `d` has the layout of eight columns of a wgmma's accumulators.
template <class Element>
MAGI_DEVICE void mma_16x8x16(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<Element, bf16>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- arithmetic

// Two floats to one register of two 16-bit values, `lo` in the low half.
template <class Element>
MAGI_DEVICE uint32_t pack2(float lo, float hi) {
  uint32_t packed;
  if constexpr (std::is_same_v<Element, bf16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
  return packed;
}
// The two 16-bit values of a register, low half first; the second argument chooses the type.
MAGI_DEVICE float2 unpack2(uint32_t packed, bf16) {
  return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
}
MAGI_DEVICE float2 unpack2(uint32_t packed, fp16) {
  return __half22float2(*reinterpret_cast<const __half2*>(&packed));
}
MAGI_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// A relative error of 2^-11 at most.
MAGI_DEVICE float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace magi::ptx
