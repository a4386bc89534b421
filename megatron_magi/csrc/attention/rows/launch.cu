// Host entries of the row kernels: check the parameters and launch.
#include <algorithm>

#include "../device/export.h"
#include "../device/kernel_list.h"
#include "kernels.cuh"
#include "params.h"

namespace magi {
namespace {

Status check(int num_parts, int row_bytes, int64_t num_rows) {
  if (num_parts < 1 || num_parts > kMagiMaxRowParts)
    return {kInvalidArgument, "num_parts must be 1 or 2, got " + std::to_string(num_parts)};
  if (row_bytes < 16 || row_bytes % 16 != 0)
    return {kInvalidArgument, "rows must be multiples of 16 bytes, got " +
                                  std::to_string(row_bytes) + "; use PyTorch's operations"};
  if (num_rows < 0 || num_rows >= int64_t{1} << 31)
    return {kInvalidArgument, "num_rows must fit in 31 bits, got " + std::to_string(num_rows)};
  return {};
}

dim3 blocks(int64_t num_rows, int rows_per_block, int num_parts) {
  return dim3(static_cast<unsigned>((num_rows + rows_per_block - 1) / rows_per_block), num_parts);
}

Status gather(const MagiGatherParams& p) {
  MAGI_RETURN_IF_ERROR(check(p.num_parts, p.row_bytes, p.num_rows));
  if (p.num_rows == 0) return {};
  const int lanes = std::min(p.row_bytes / 16, kRowThreads);
  const dim3 grid = blocks(p.num_rows, kRowThreads / lanes * kRowsInFlight, p.num_parts);
  gather_rows_kernel<<<grid, kRowThreads, 0, static_cast<cudaStream_t>(p.stream)>>>(p, lanes);
  return cuda_status(cudaGetLastError(), "gather rows");
}

Status add(const MagiAddParams& p) {
  MAGI_RETURN_IF_ERROR(check(p.num_parts, 2 * p.width, p.num_rows));
  if (p.num_rows == 0) return {};
  const int lanes = std::min(p.width / 8, kRowThreads);
  const dim3 grid = blocks(p.num_rows, kRowThreads / lanes, p.num_parts);
  add_rows_kernel<<<grid, kRowThreads, 0, static_cast<cudaStream_t>(p.stream)>>>(p, lanes);
  return cuda_status(cudaGetLastError(), "add rows");
}

// Lets time pass on a stream.
Status pause(uint64_t nanoseconds, void* stream) {
  pause_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(nanoseconds);
  return cuda_status(cudaGetLastError(), "pause");
}

}  // namespace

void list_row_kernels(KernelList* kernels) {
  kernels->push_back(kernel_of(gather_rows_kernel, kAnyDtype));
  kernels->push_back(kernel_of(add_rows_kernel, kAnyDtype));
  kernels->push_back(kernel_of(pause_kernel, kAnyDtype));
}

}  // namespace magi

MAGI_EXPORT int magi_gather_rows(const MagiGatherParams* params, char* message, int message_bytes) {
  return magi::report(magi::gather(*params), message, message_bytes);
}

MAGI_EXPORT int magi_add_rows(const MagiAddParams* params, char* message, int message_bytes) {
  return magi::report(magi::add(*params), message, message_bytes);
}

MAGI_EXPORT int magi_pause(uint64_t nanoseconds, void* stream) {
  return magi::pause(nanoseconds, stream).code;
}
