// Host side of one forward variant: tensor maps, launch configuration, launch.
#pragma once
#include <cmath>

#include "../device/kernel_chain.h"
#include "../device/shared_memory.h"
#include "../device/tensor_map.h"
#include "kernel.cuh"
#include "variants.h"

namespace magi {

// The most that softcap * log2(e) may be without a shift: 2^80 times 2^20 keys times values of 2^26
// stays below 2^127.
constexpr float kLargestUnshifted = 80.f;

template <class Traits>
Status run_fwd(const MagiFwdParams& args) {
  constexpr int kD = Traits::kHeadDim, kE = Traits::kValueDim;
  const MapElement element = map_element(args.dtype);
  FwdKernelParams p;
  p.args = args;
  p.pack_shift = __builtin_ctz(args.pack);
  p.units_per_kv = args.num_heads_q / args.num_heads_kv / args.pack;
  p.num_units = args.num_heads_q / args.pack;
  p.section_units = args.heads_per_section * p.units_per_kv;
  p.num_items = args.num_tiles * p.num_units;
  p.scale_log2 =
      (Traits::kSoftcap ? args.softcap : args.softmax_scale) * static_cast<float>(M_LOG2E);
  p.inverse_scale_log2 = 1.f / p.scale_log2;
  p.cap_scale = Traits::kSoftcap ? args.softmax_scale / args.softcap : 0.f;
  p.unshifted = Traits::kMayBeUnshifted && p.scale_log2 <= kLargestUnshifted;
  if (p.unshifted) {
    const double cap_log2 = args.softcap * M_LOG2E;
    p.cap_polynomial = make_cap_polynomial(p.cap_scale, cap_log2);
    p.small_cap = make_small_cap_polynomial(p.cap_scale, cap_log2);
  }

  if (p.num_items > 0) {
    const bool stage_out = args.out_dtype != kMagiFp32;
    const MagiTensor& out = stage_out ? args.out : args.q;  // fp32 leaves without TMA
    auto encode = [&](CUtensorMap* map, const MagiTensor& tensor, int width) {
      return args.pack == 1
                 ? encode_head_tile(map, element, tensor, args.num_q, args.num_heads_q, width, 64)
                 : encode_packed_tile(map, element, tensor, args.num_q, args.num_heads_q, width,
                                      args.pack, 64 / args.pack);
    };
    MAGI_RETURN_IF_ERROR(encode(&p.map_q, args.q, kD));
    MAGI_RETURN_IF_ERROR(encode(&p.map_out, out, kE));
    MAGI_RETURN_IF_ERROR(encode_head_tile(&p.map_k, element, args.k, args.num_k, args.num_heads_kv,
                                          kD, Traits::kBlockN));
    MAGI_RETURN_IF_ERROR(encode_head_tile(&p.map_v, element, args.v, args.num_k, args.num_heads_kv,
                                          kE, Traits::kBlockN));
  }

  KernelCall call = kernel_call(fwd_kernel<Traits>, dim3(args.num_sms), Traits::kThreads, &p);
  call.shared_bytes = Traits::kSharedBytes;
  static SharedMemory given;
  MAGI_RETURN_IF_ERROR(cuda_status(given.give(call.function, Traits::kSharedBytes),
                                   "this GPU does not give the forward kernel its shared memory"));
  KernelChain chain;
  chain.add(call);
  return cuda_status(chain.launch(static_cast<cudaStream_t>(args.stream)),
                     "launch of the forward kernel");
}

template <class Traits>
constexpr int kFwdDtype =
    std::is_same_v<typename Traits::Element, ptx::bf16> ? kMagiBf16 : kMagiFp16;

template <class Traits>
Kernel fwd_main_kernel() {
  return kernel_of(fwd_kernel<Traits>, kFwdDtype<Traits>, Traits::kSharedBytes);
}

template <class Traits>
constexpr FwdInstance fwd_variant() {
  return {kFwdDtype<Traits>, Traits::kHeadDim, Traits::kValueDim,      Traits::kBlockM,
          Traits::kBlockN,   run_fwd<Traits>,  fwd_main_kernel<Traits>};
}

// Defines the variants of these tiles, in the order of FwdKind.
#define MAGI_DEFINE_FWD(name, element, head_dim, value_dim, block_m, block_n)                 \
  const FwdInstance name[kNumFwdKinds] = {                                                    \
      fwd_variant<FwdTraits<element, head_dim, block_m, block_n, value_dim, false, false>>(), \
      fwd_variant<FwdTraits<element, head_dim, block_m, block_n, value_dim, true, false>>(),  \
      fwd_variant<FwdTraits<element, head_dim, block_m, block_n, value_dim, true, true>>()}

}  // namespace magi
