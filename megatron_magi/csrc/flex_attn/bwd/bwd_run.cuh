// Launches of the backward kernels; included by the instantiations only.
#pragma once
#include <algorithm>

#include "bwd_elementwise.cuh"
#include "bwd_kernel.cuh"

namespace magi {

template <int kDtype>
using BwdElement = std::conditional_t<kDtype == kMagiBf16, ptx::bf16, ptx::fp16>;

template <int kDtype, int kHeadDim, bool kDeterministic>
cudaError_t run_bwd_main(const BwdMaps& maps, const BwdArgs& args, int num_blocks,
                         cudaStream_t stream) {
  using Traits = BwdTraits<BwdElement<kDtype>, kHeadDim, kDeterministic>;
  const auto kernel = bwd_kernel<Traits>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSmemBytes);
  if (error != cudaSuccess) return error;
  kernel<<<num_blocks, Traits::kThreads, Traits::kSmemBytes, stream>>>(maps, args);
  return cudaGetLastError();
}

template <int kDtype, int kHeadDim>
cudaError_t run_bwd_prepare(const BwdPrepareArgs& args, cudaStream_t stream) {
  const dim3 grid((args.stat_rows + kPrepareTokens - 1) / kPrepareTokens,
                  (args.num_heads_q + kPrepareHeads - 1) / kPrepareHeads);
  bwd_prepare_kernel<BwdElement<kDtype>, kHeadDim><<<grid, kPrepareThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template <int kDtype, int kHeadDim>
cudaError_t run_bwd_delta(const MagiDeltaParams& args, cudaStream_t stream) {
  const int64_t threads = int64_t{args.num_tokens} * args.num_heads * (kHeadDim / 8);
  const int blocks = static_cast<int>((threads + 255) / 256);
  bwd_delta_kernel<BwdElement<kDtype>, kHeadDim><<<blocks, 256, 0, stream>>>(args);
  return cudaGetLastError();
}

template <int kDtype, int kHeadDim>
cudaError_t run_bwd_convert(const BwdConvertArgs& args, cudaStream_t stream) {
  int64_t most_rows = 0;
  for (int i = 0; i < args.num_jobs; ++i)
    most_rows = std::max(most_rows, int64_t{args.jobs[i].num_tokens} * args.jobs[i].num_heads);
  if (most_rows == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>((most_rows * (kHeadDim / 8) + 255) / 256), args.num_jobs);
  bwd_convert_kernel<BwdElement<kDtype>, kHeadDim><<<grid, 256, 0, stream>>>(args);
  return cudaGetLastError();
}

#define MAGI_INSTANTIATE_BWD(dtype, head_dim)                                                    \
  template cudaError_t run_bwd_main<dtype, head_dim, false>(const BwdMaps&, const BwdArgs&, int, \
                                                            cudaStream_t);                       \
  template cudaError_t run_bwd_main<dtype, head_dim, true>(const BwdMaps&, const BwdArgs&, int,  \
                                                           cudaStream_t);                        \
  template cudaError_t run_bwd_prepare<dtype, head_dim>(const BwdPrepareArgs&, cudaStream_t);    \
  template cudaError_t run_bwd_delta<dtype, head_dim>(const MagiDeltaParams&, cudaStream_t);     \
  template cudaError_t run_bwd_convert<dtype, head_dim>(const BwdConvertArgs&, cudaStream_t)

}  // namespace magi
