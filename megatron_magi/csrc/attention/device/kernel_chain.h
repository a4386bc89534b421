// Kernels that run one after the other on a stream. They are launched as one CUDA graph, also a
// single one: a launch keeps the host 2.5 to 4 us, a graph of one kernel with new parameters 1.4,
// and one of three kernels 2.
#pragma once
#include <cuda_runtime.h>

namespace magi {

// Arguments of <<<...>>>.
struct KernelCall {
  const void* function;
  dim3 grid, block;
  unsigned shared_bytes;
  void* args[2];  // addresses of the kernel's arguments, which live until the launch
};

template <class... Args>
KernelCall kernel_call(void (*kernel)(Args...), dim3 grid, int threads, void* args) {
  return {reinterpret_cast<const void*>(kernel), grid, dim3(threads), 0, {args, nullptr}};
}

class KernelChain {
 public:
  static constexpr int kMost = 3;

  void add(const KernelCall& call) { calls_[num_++] = call; }

  // Enqueues them all, or none. Threads may do so at the same time, each with a chain of its own.
  cudaError_t launch(cudaStream_t stream) const;

 private:
  KernelCall calls_[kMost];
  int num_ = 0;
};

}  // namespace magi
