// Functions of the CUDA driver, looked up at run time: so the library does not link libcuda and
// loads on machines without a driver.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

namespace magi {

// The driver's function of this name, as of CUDA 12.0; null if there is none.
template <class Function>
Function driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<Function>(function);
}

}  // namespace magi
