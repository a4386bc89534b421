// The products of the tensor cores (wgmma) and the descriptors of their operands in shared memory.
// The other PTX instructions stand in ptx.h.
//
// Layout facts behind the descriptors (128-byte swizzle, panels of 64 16-bit columns, panel base
// 1024-byte aligned; with 64-byte swizzle and panels of 32 columns every size but 32 is half):
//   K-major operand:  stride offset 1024, leading offset unused, next k16 = +32 bytes in a panel.
//   MN-major operand: stride offset 1024 (8 rows of k), leading offset = bytes from one
//                     64-column panel to the next, next k16 = +2048 bytes, transpose flag 1.
#pragma once
#include "ptx.h"

namespace magi::ptx {

MAGI_DEVICE void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
MAGI_DEVICE void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
MAGI_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the computation of `value` in front of the next wgmma_wait. ptxas moves a wait to the top
// of its basic block, over arithmetic that was meant to run during the products still in flight
// (seen with 13.0: the whole softmax went behind the wait). The store never happens: `value` must
// be at least 0, or NaN.
MAGI_DEVICE void compute_before_wait(float value, uint32_t any_shared_address) {
  asm volatile(
      "{.reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p st.shared.f32 [%1], %0;}" ::"f"(value),
      "r"(any_shared_address)
      : "memory");
}

// Keeps the compiler from moving reads or copies of wgmma registers across this point.
template <int kCount>
MAGI_DEVICE void pin_registers(float (&regs)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(regs[i])::"memory");
}

// Descriptor of a swizzled operand in panels of 64 or 32 columns whose start is a multiple of 1024
// bytes (plus k16 steps). `leading_bytes` matters only for an MN-major operand of more than one
// panel.
template <int kPanelCols = 64>
MAGI_DEVICE uint64_t smem_descriptor(uint32_t addr, uint32_t leading_bytes = 0) {
  static_assert(kPanelCols == 64 || kPanelCols == 32, "swizzles of 128 or 64 bytes");
  constexpr uint64_t kStride = 16 * kPanelCols >> 4, kSwizzle = kPanelCols == 64 ? 1 : 2;
  return static_cast<uint64_t>((addr >> 4) & 0x3fff) |
         static_cast<uint64_t>((leading_bytes >> 4) & 0x3fff) << 16 | kStride << 32 |
         kSwizzle << 62;
}
// Descriptor of a K-major operand without swizzle: blocks of 8 rows x 16 bytes, contiguous;
// `leading_bytes` to the next 16 bytes of k, `stride_bytes` to the next 8 rows.
MAGI_DEVICE uint64_t plain_descriptor(uint32_t addr, uint32_t leading_bytes,
                                      uint32_t stride_bytes) {
  return static_cast<uint64_t>((addr >> 4) & 0x3fff) |
         static_cast<uint64_t>((leading_bytes >> 4) & 0x3fff) << 16 |
         static_cast<uint64_t>((stride_bytes >> 4) & 0x3fff) << 32;
}
// Advance a descriptor by a compile-time byte offset: one add on the low word.
MAGI_DEVICE uint64_t descriptor_plus(uint64_t desc, uint32_t bytes) {
  return desc + (bytes >> 4);
}

// Wgmma<N, Element>::ss / rs: D[64, N] (+)= A[64, 16] B[16, N], fp32 accumulators, A and B of
// Element. kTransA/kTransB: 0 = K-major, 1 = MN-major in shared memory. accumulate 0 overwrites D;
// ss_first does too, and tells the compiler so: what D held before need not be kept.
template <int N, class Element>
struct Wgmma;

// The operands of N / 2 accumulators.
#define MAGI_REGS_32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define MAGI_REGS_48 MAGI_REGS_32 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define MAGI_REGS_64 MAGI_REGS_48 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define MAGI_REGS_80 MAGI_REGS_64 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define MAGI_REGS_96 MAGI_REGS_80 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define MAGI_REGS_128 \
  MAGI_REGS_96        \
  ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define MAGI_REGS_192                                                        \
  MAGI_REGS_128                                                              \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81" \
  ",%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define MAGI_REGS_256                                                                 \
  MAGI_REGS_192                                                                       \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112" \
  ",%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// Eight accumulators from d[i] on: added to, or overwritten.
#define MAGI_ADD8(i)                                                                          \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define MAGI_NEW8(i)                                                                          \
  "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3]), "=f"(d[i + 4]), "=f"(d[i + 5]), \
      "=f"(d[i + 6]), "=f"(d[i + 7])
// All N / 2 of them, where X is one of the two.
#define MAGI_ACC_32(X) X(0), X(8)
#define MAGI_ACC_48(X) MAGI_ACC_32(X), X(16)
#define MAGI_ACC_64(X) MAGI_ACC_48(X), X(24)
#define MAGI_ACC_80(X) MAGI_ACC_64(X), X(32)
#define MAGI_ACC_96(X) MAGI_ACC_80(X), X(40)
#define MAGI_ACC_128(X) MAGI_ACC_96(X), X(48), X(56)
#define MAGI_ACC_192(X) MAGI_ACC_128(X), X(64), X(72), X(80), X(88)
#define MAGI_ACC_256(X) MAGI_ACC_192(X), X(96), X(104), X(112), X(120)

// i0..i6 are the operand numbers that follow the N/2 accumulators.
#define MAGI_WGMMA(N, Element, TYPE, i0, i1, i2, i3, i4, i5, i6)                                   \
  template <>                                                                                      \
  struct Wgmma<N, Element> {                                                                       \
    template <int kTransA, int kTransB>                                                            \
    static MAGI_DEVICE void ss(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {        \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #i2                                           \
                   ", 0;\n"                                                                        \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                 \
                   " {" MAGI_REGS_##N "}, %" #i0 ", %" #i1 ", p, 1, 1, %" #i3 ", %" #i4 ";}"       \
                   : MAGI_ACC_##N(MAGI_ADD8)                                                       \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(kTransA), "n"(kTransB));                 \
    }                                                                                              \
    template <int kTransA, int kTransB>                                                            \
    static MAGI_DEVICE void ss_first(float (&d)[N / 2], uint64_t a, uint64_t b) {                  \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                 \
                   " {" MAGI_REGS_##N "}, %" #i0 ", %" #i1 ", 0, 1, 1, %" #i2 ", %" #i3 ";"        \
                   : MAGI_ACC_##N(MAGI_NEW8)                                                       \
                   : "l"(a), "l"(b), "n"(kTransA), "n"(kTransB));                                  \
    }                                                                                              \
    template <int kTransB>                                                                         \
    static MAGI_DEVICE void rs_first(float (&d)[N / 2], const uint32_t* a, uint64_t b) {           \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                 \
                   " {" MAGI_REGS_##N "}, {%" #i0 ",%" #i1 ",%" #i2 ",%" #i3 "}, %" #i4            \
                                      ", 0, 1, 1, %" #i5 ";"                                       \
                   : MAGI_ACC_##N(MAGI_NEW8)                                                       \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransB));            \
    }                                                                                              \
    template <int kTransB>                                                                         \
    static MAGI_DEVICE void rs(float (&d)[N / 2], const uint32_t* a, uint64_t b, int accumulate) { \
      asm volatile(                                                                                \
          "{.reg .pred p; setp.ne.b32 p, %" #i5                                                    \
          ", 0;\n"                                                                                 \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" MAGI_REGS_##N       \
          "}, {%" #i0 ",%" #i1 ",%" #i2 ",%" #i3 "}, %" #i4 ", p, 1, 1, %" #i6 ";}"                \
          : MAGI_ACC_##N(MAGI_ADD8)                                                                \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransB));    \
    }                                                                                              \
  };
#define MAGI_WGMMA_BOTH(N, ...)            \
  MAGI_WGMMA(N, bf16, "bf16", __VA_ARGS__) \
  MAGI_WGMMA(N, fp16, "f16", __VA_ARGS__)

MAGI_WGMMA_BOTH(32, 16, 17, 18, 19, 20, 21, 22)
MAGI_WGMMA_BOTH(48, 24, 25, 26, 27, 28, 29, 30)
MAGI_WGMMA_BOTH(64, 32, 33, 34, 35, 36, 37, 38)
MAGI_WGMMA_BOTH(80, 40, 41, 42, 43, 44, 45, 46)
MAGI_WGMMA_BOTH(96, 48, 49, 50, 51, 52, 53, 54)
MAGI_WGMMA_BOTH(128, 64, 65, 66, 67, 68, 69, 70)
MAGI_WGMMA_BOTH(192, 96, 97, 98, 99, 100, 101, 102)
MAGI_WGMMA_BOTH(256, 128, 129, 130, 131, 132, 133, 134)

#undef MAGI_WGMMA_BOTH
#undef MAGI_WGMMA

}  // namespace magi::ptx
