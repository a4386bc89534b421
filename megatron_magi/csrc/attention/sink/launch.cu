// The kernel of the gradient of sinks (params.h), and its exported function.
#include "../device/export.h"
#include "../device/kernel_list.h"
#include "params.h"

namespace magi {
namespace {

constexpr int kSinkHeads = 32;  // of a block; they are neighbours in memory
constexpr int kSinkTokens = 8;  // that a block takes at a time

// Blocks: x over tokens, y over heads. The order of the sums depends on the shape alone.
__global__ __launch_bounds__(kSinkHeads* kSinkTokens) void sink_gradient_kernel(
    const __grid_constant__ MagiSinkParams p) {
  __shared__ float sums[kSinkTokens][kSinkHeads];
  const int head = blockIdx.y * kSinkHeads + threadIdx.x;
  const bool inside = head < p.num_heads;
  const float shared_sink = inside && !p.per_token ? p.sink_lse[head] : 0.f;
  const int step = gridDim.x * kSinkTokens;
  float sum = 0.f;
  if (inside) {
#pragma unroll 4
    for (int token = blockIdx.x * kSinkTokens + threadIdx.y; token < p.num_tokens; token += step) {
      const int64_t at = int64_t{token} * p.num_heads + head;
      const float sink = p.per_token ? p.sink_lse[at] : shared_sink;
      const float grad = -expf(sink - p.lse[at]) * p.delta[at];
      if (p.per_token) p.grad[at] = grad;
      sum += grad;
    }
  }
  if (p.per_token) return;
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || !inside) return;
#pragma unroll
  for (int i = 1; i < kSinkTokens; ++i) sum += sums[i][threadIdx.x];
  p.grad[int64_t{blockIdx.x} * p.num_heads + head] = sum;
}

Status sink_gradient(const MagiSinkParams& p) {
  if (p.num_tokens <= 0 || p.num_heads <= 0 || p.num_blocks <= 0)
    return {kInvalidArgument, "the gradient of sinks needs tokens, heads and blocks, got " +
                                  std::to_string(p.num_tokens) + ", " +
                                  std::to_string(p.num_heads) + " and " +
                                  std::to_string(p.num_blocks) + "; leave empty calls out"};
  const dim3 grid(p.num_blocks, (p.num_heads + kSinkHeads - 1) / kSinkHeads);
  const dim3 threads(kSinkHeads, kSinkTokens);
  sink_gradient_kernel<<<grid, threads, 0, static_cast<cudaStream_t>(p.stream)>>>(p);
  return cuda_status(cudaGetLastError(), "the gradient of sinks");
}

}  // namespace

void list_sink_kernels(KernelList* kernels) {
  kernels->push_back(kernel_of(sink_gradient_kernel, kAnyDtype));
}

}  // namespace magi

MAGI_EXPORT int magi_sink_gradient(const MagiSinkParams* params, char* message, int message_bytes) {
  return magi::report(magi::sink_gradient(*params), message, message_bytes);
}
