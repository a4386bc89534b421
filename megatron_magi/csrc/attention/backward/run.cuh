// Calls of the backward kernels; included by the instantiations only.
#pragma once
#include "../device/shared_memory.h"
#include "elementwise.cuh"
#include "kernel.cuh"

namespace magi {

template <int kDtype>
using BwdElement = std::conditional_t<kDtype == kMagiBf16, ptx::bf16, ptx::fp16>;

template <int kDtype, int kHeadDim, int kValueDim, bool kDeterministic, bool kSoftcap>
cudaError_t add_bwd_main(BwdMaps* maps, BwdArgs* args, int num_blocks, KernelChain* chain) {
  using Traits = BwdTraits<BwdElement<kDtype>, kHeadDim, kDeterministic, kValueDim, kSoftcap>;
  KernelCall call = kernel_call(bwd_kernel<Traits>, dim3(num_blocks), Traits::kThreads, maps);
  call.args[1] = args;
  call.shared_bytes = Traits::kSmemBytes;
  chain->add(call);
  static SharedMemory given;
  return given.give(call.function, Traits::kSmemBytes);
}

template <int kDtype, int kValueDim, bool kSoftcap>
void add_bwd_prepare(BwdPrepareArgs* args, KernelChain* chain) {
  const dim3 grid((args->stat_rows + kPrepareTokens - 1) / kPrepareTokens,
                  (args->num_heads_q + kPrepareHeads - 1) / kPrepareHeads);
  chain->add(kernel_call(bwd_prepare_kernel<BwdElement<kDtype>, kValueDim, kSoftcap>, grid,
                         kPrepareThreads, args));
}

template <int kDtype, int kValueDim>
cudaError_t run_bwd_delta(const MagiDeltaParams& args, cudaStream_t stream) {
  const int64_t threads = int64_t{args.num_tokens} * args.num_heads * kRowLanes<kValueDim>;
  const int blocks = static_cast<int>((threads + 255) / 256);
  bwd_delta_kernel<BwdElement<kDtype>, kValueDim><<<blocks, 256, 0, stream>>>(args);
  return cudaGetLastError();
}

template <int kDtype, int kHeadDim, int kValueDim>
void add_bwd_convert(BwdConvertArgs* args, KernelChain* chain) {
  int blocks = 0;
  for (int i = 0; i < args->num_jobs; ++i) {
    BwdConvertJob& job = args->jobs[i];
    const int64_t threads = int64_t{job.num_tokens} * job.num_heads * (job.width / 8);
    job.end_block = blocks += static_cast<int>((threads + 255) / 256);
  }
  if (blocks == 0) return;
  chain->add(kernel_call(bwd_convert_kernel<BwdElement<kDtype>, kHeadDim, kValueDim>, dim3(blocks),
                         256, args));
}

template <int kDtype, int kHeadDim, int kValueDim, bool kDeterministic, bool kSoftcap>
Kernel bwd_main_kernel() {
  using Traits = BwdTraits<BwdElement<kDtype>, kHeadDim, kDeterministic, kValueDim, kSoftcap>;
  return kernel_of(bwd_kernel<Traits>, kDtype, Traits::kSmemBytes);
}

template <int kDtype, int kHeadDim, int kValueDim, bool kSoftcap>
void list_bwd_main(KernelList* kernels) {
  kernels->push_back(bwd_main_kernel<kDtype, kHeadDim, kValueDim, false, kSoftcap>());
  kernels->push_back(bwd_main_kernel<kDtype, kHeadDim, kValueDim, true, kSoftcap>());
}

template <int kDtype, int kHeadDim, int kValueDim>
void list_bwd(KernelList* kernels) {
  using Element = BwdElement<kDtype>;
  kernels->push_back(kernel_of(bwd_convert_kernel<Element, kHeadDim, kValueDim>, kDtype));
  if constexpr (kHeadDim == kValueDim) {  // they know the width of values only
    kernels->push_back(kernel_of(bwd_prepare_kernel<Element, kValueDim, false>, kDtype));
    kernels->push_back(kernel_of(bwd_prepare_kernel<Element, kValueDim, true>, kDtype));
    kernels->push_back(kernel_of(bwd_delta_kernel<Element, kValueDim>, kDtype));
  }
}

#define MAGI_INSTANTIATE_BWD_MAIN(dtype, head_dim, value_dim, softcap)                             \
  template cudaError_t add_bwd_main<dtype, head_dim, value_dim, false, softcap>(                   \
      BwdMaps*, BwdArgs*, int, KernelChain*);                                                      \
  template cudaError_t add_bwd_main<dtype, head_dim, value_dim, true, softcap>(BwdMaps*, BwdArgs*, \
                                                                               int, KernelChain*); \
  template void list_bwd_main<dtype, head_dim, value_dim, softcap>(KernelList*)
// All but the main kernels with softcap, which take as long to compile.
#define MAGI_INSTANTIATE_BWD(dtype, head_dim, value_dim)                                    \
  MAGI_INSTANTIATE_BWD_MAIN(dtype, head_dim, value_dim, false);                             \
  template void add_bwd_convert<dtype, head_dim, value_dim>(BwdConvertArgs*, KernelChain*); \
  template void list_bwd<dtype, head_dim, value_dim>(KernelList*)
// Kernels that depend on the width of values alone.
#define MAGI_INSTANTIATE_BWD_ROWS(dtype, value_dim)                                      \
  template void add_bwd_prepare<dtype, value_dim, false>(BwdPrepareArgs*, KernelChain*); \
  template void add_bwd_prepare<dtype, value_dim, true>(BwdPrepareArgs*, KernelChain*);  \
  template cudaError_t run_bwd_delta<dtype, value_dim>(const MagiDeltaParams&, cudaStream_t)

}  // namespace magi
