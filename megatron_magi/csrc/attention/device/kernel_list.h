// All kernels of the library, so that they can be loaded before the first one is launched: the
// driver loads a kernel at its first use otherwise, and waits for the GPU while it does.
#pragma once
#include <vector>

#include "status.h"

namespace magi {

constexpr int kAnyDtype = -1;

struct Kernel {
  const void* function;
  int dtype;         // MagiDtype of what it attends, or kAnyDtype
  int shared_bytes;  // dynamic shared memory of its launches
};

using KernelList = std::vector<Kernel>;

// Each adds what it launches, from the table of variants that it launches from.
void list_fwd_kernels(KernelList* kernels);
void list_bwd_kernels(KernelList* kernels);
void list_row_kernels(KernelList* kernels);
void list_sink_kernels(KernelList* kernels);

template <class... Args>
Kernel kernel_of(void (*function)(Args...), int dtype, int shared_bytes = 0) {
  return {reinterpret_cast<const void*>(function), dtype, shared_bytes};
}

inline KernelList all_kernels() {
  KernelList kernels;
  list_fwd_kernels(&kernels);
  list_bwd_kernels(&kernels);
  list_row_kernels(&kernels);
  list_sink_kernels(&kernels);
  return kernels;
}

// Loads the kernels of one dtype, and those of any, onto the current device; counts them.
inline Status load_kernels(int dtype, int* num_loaded) {
  *num_loaded = 0;
  for (const Kernel& kernel : all_kernels()) {
    if (kernel.dtype != dtype && kernel.dtype != kAnyDtype) continue;
    cudaFuncAttributes attributes;  // asking for them is what loads it
    MAGI_RETURN_IF_ERROR(
        cuda_status(cudaFuncGetAttributes(&attributes, kernel.function), "loading the kernels"));
    if (kernel.shared_bytes > 0)
      MAGI_RETURN_IF_ERROR(cuda_status(
          cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               kernel.shared_bytes),
          "this GPU does not give a kernel its shared memory"));
    ++*num_loaded;
  }
  return {};
}

}  // namespace magi
