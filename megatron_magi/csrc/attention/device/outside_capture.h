// Host calls that are legal while one of its streams is captured into a CUDA graph.
#pragma once
#include <cuda_runtime.h>

namespace magi {

// Runs what the runtime forbids while any thread captures, because it might be part of it.
template <class Call>
cudaError_t outside_capture(const Call& call) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode);
  if (error != cudaSuccess) return error;
  const cudaError_t result = call();
  error = cudaThreadExchangeStreamCaptureMode(&mode);
  return error != cudaSuccess ? error : result;
}

}  // namespace magi
