// The kernels of what params.h describes: bandwidth-bound, 16 bytes a thread and access.
#pragma once
#include "../device/ptx.h"
#include "params.h"

namespace magi {

constexpr int kRowThreads = 256;
constexpr int kRowsInFlight = 4;  // per thread of the gather: loads before the first store

// `lanes` threads share a row. Blocks: x over rows, y over parts.
__global__ __launch_bounds__(kRowThreads) void gather_rows_kernel(
    const __grid_constant__ MagiGatherParams p, int lanes) {
  const MagiRows src = p.src[blockIdx.y], dst = p.dst[blockIdx.y];
  const int vectors = p.row_bytes / 16;
  const int rows_at_once = kRowThreads / lanes;
  const int slot = static_cast<int>(threadIdx.x) / lanes;
  if (slot >= rows_at_once) return;
  const int64_t first = int64_t{blockIdx.x} * rows_at_once * kRowsInFlight + slot;
  for (int col = static_cast<int>(threadIdx.x) % lanes; col < vectors; col += lanes) {
    uint4 held[kRowsInFlight];
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      const int64_t row = first + i * rows_at_once;
      if (row >= p.num_rows) continue;
      const int64_t from = p.index == nullptr ? row : p.index[row];
      held[i] = reinterpret_cast<const uint4*>(static_cast<const char*>(src.data) +
                                               from * src.stride)[col];
    }
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      const int64_t row = first + i * rows_at_once;
      if (row < p.num_rows)
        reinterpret_cast<uint4*>(static_cast<char*>(dst.data) + row * dst.stride)[col] = held[i];
    }
  }
}

// Adds 8 neighbouring elements of a row to `sum`.
MAGI_DEVICE void add8(const MagiRows& rows, int64_t row, int col, int32_t dtype, float (&sum)[8]) {
  const char* at = static_cast<const char*>(rows.data) + row * rows.stride;
  if (dtype == kMagiFp32) {
    const float4* v = reinterpret_cast<const float4*>(at) + 2 * col;
    const float4 a = v[0], b = v[1];
    sum[0] += a.x, sum[1] += a.y, sum[2] += a.z, sum[3] += a.w;
    sum[4] += b.x, sum[5] += b.y, sum[6] += b.z, sum[7] += b.w;
    return;
  }
  const uint4 v = reinterpret_cast<const uint4*>(at)[col];
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 pair = dtype == kMagiBf16 ? ptx::unpack2(words[j], ptx::bf16{})
                                           : ptx::unpack2(words[j], ptx::fp16{});
    sum[2 * j] += pair.x, sum[2 * j + 1] += pair.y;
  }
}

MAGI_DEVICE void store8(const MagiRows& rows, int64_t row, int col, int32_t dtype,
                        const float (&x)[8]) {
  char* at = static_cast<char*>(rows.data) + row * rows.stride;
  if (dtype == kMagiFp32) {
    float4* v = reinterpret_cast<float4*>(at) + 2 * col;
    v[0] = {x[0], x[1], x[2], x[3]};
    v[1] = {x[4], x[5], x[6], x[7]};
    return;
  }
  uint32_t words[4];
#pragma unroll
  for (int j = 0; j < 4; ++j)
    words[j] = dtype == kMagiBf16 ? ptx::pack2<ptx::bf16>(x[2 * j], x[2 * j + 1])
                                  : ptx::pack2<ptx::fp16>(x[2 * j], x[2 * j + 1]);
  reinterpret_cast<uint4*>(at)[col] = {words[0], words[1], words[2], words[3]};
}

// `lanes` threads share a row, 8 elements each at a time. Blocks: x over rows, y over parts.
__global__ __launch_bounds__(kRowThreads) void add_rows_kernel(
    const __grid_constant__ MagiAddParams p, int lanes) {
  const int part = blockIdx.y;
  const int rows_at_once = kRowThreads / lanes;
  const int slot = static_cast<int>(threadIdx.x) / lanes;
  const int64_t row = int64_t{blockIdx.x} * rows_at_once + slot;
  if (slot >= rows_at_once || row >= p.num_rows) return;
  const int begin = p.begin[row], end = p.begin[row + 1];
  const MagiRows own = p.own[part], received = p.received[part], dst = p.dst[part];
  if (dst.data == own.data && begin == end) return;
  for (int col = static_cast<int>(threadIdx.x) % lanes; col < p.width / 8; col += lanes) {
    float sum[8] = {};
    add8(own, row, col, kMagiFp32, sum);
    for (int j = begin; j < end; ++j) add8(received, p.sources[j], col, p.received_dtype, sum);
    store8(dst, row, col, p.dst_dtype, sum);
  }
}

// Lets time pass on a stream; see head_start in core/cuda/abi.py.
__global__ void pause_kernel(uint64_t nanoseconds) {
  for (const uint64_t begin = ptx::global_timer(); ptx::global_timer() - begin < nanoseconds;)
    __nanosleep(100);
}

}  // namespace magi
