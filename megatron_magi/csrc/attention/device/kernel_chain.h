// Kernels that run one after the other on a stream. They are launched as one CUDA graph, because a
// launch keeps the host 2.5 to 4 us and a graph of three kernels, with new parameters, 2 us.
#pragma once
#include <cuda_runtime.h>

namespace magi {

// What <<<...>>> takes.
struct KernelCall {
  const void* function;
  dim3 grid, block;
  unsigned shared_bytes;
  void* args[2];  // addresses of the kernel's arguments, which live until the launch
};

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
