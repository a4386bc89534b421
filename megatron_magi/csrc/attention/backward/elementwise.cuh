// The bandwidth-bound kernels around the main kernel: prepare (stats), convert (fp32 sums to the
// wanted dtype) and delta, which callers make once for all stages. 16 bytes a thread and access.
#pragma once
#include <cmath>

#include "../device/ptx.h"
#include "args.h"

namespace magi {

// Sum of the products of 8 neighbouring elements of two rows.
template <class Element>
MAGI_DEVICE float dot8(const MagiTensor& a, const MagiTensor& b, int64_t token, int64_t head,
                       int col) {
  const auto load = [&](const MagiTensor& t) {
    return *reinterpret_cast<const uint4*>(static_cast<const Element*>(t.data) +
                                           token * t.stride_token + head * t.stride_head + col);
  };
  const uint4 u = load(a), v = load(b);
  const uint32_t x[4] = {u.x, u.y, u.z, u.w}, y[4] = {v.x, v.y, v.z, v.w};
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 p = ptx::unpack2(x[j], Element{}), q = ptx::unpack2(y[j], Element{});
    sum = fmaf(p.x, q.x, fmaf(p.y, q.y, sum));
  }
  return sum;
}

template <int kLanes>
MAGI_DEVICE float sum_over_lanes(float sum) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
  return sum;
}

// Threads of a row of which each has 8 elements: a power of two, because sums go round among them.
// Of 96 elements the last four have none.
template <int kWidth>
constexpr int kRowLanes = kWidth == 96 ? 16 : kWidth / 8;

template <int kWidth>
MAGI_DEVICE bool has_elements(int lane) {
  return kWidth == 8 * kRowLanes<kWidth> || 8 * lane < kWidth;
}

template <class Element, int kValueDim>
__global__ __launch_bounds__(256) void bwd_delta_kernel(MagiDeltaParams args) {
  constexpr int kLanes = kRowLanes<kValueDim>;
  const int64_t row = blockIdx.x * int64_t{256 / kLanes} + threadIdx.x / kLanes;
  const int64_t token = row / args.num_heads, head = row % args.num_heads;
  const int lane = threadIdx.x % kLanes;
  const bool inside = token < args.num_tokens;
  const float sum =
      sum_over_lanes<kLanes>(inside && has_elements<kValueDim>(lane)
                                 ? dot8<Element>(args.out, args.dout, token, head, 8 * lane)
                                 : 0.f);
  if (inside && lane == 0) args.delta[row] = sum;
}

// Three 16-bit parts of a number; infinity and NaN stay what they are.
template <class Element>
MAGI_DEVICE uint4 split_stat(float x) {
  const auto round = [](float y) { return ptx::unpack2(ptx::pack2<Element>(y, 0.f), Element{}).x; };
  const float high = round(x / kStatHigh);
  const float rest = isfinite(high) ? x - high * kStatHigh : 0.f;
  const float middle = round(rest / kStatMiddle);
  const float low = (rest - middle * kStatMiddle) / kStatLow;
  return {ptx::pack2<Element>(high, middle), ptx::pack2<Element>(low, 0.f), 0, 0};
}

// The shift of a row that sees nothing: finite, so that masked cells stay finite.
constexpr float kHidden = -3e4f * kStatHigh;

constexpr int kPrepareTokens = 32;
constexpr int kPrepareHeads = 8;
constexpr int kPrepareThreads = kPrepareTokens * kPrepareHeads;

using PrepareDeltas = float[kPrepareHeads][kPrepareTokens + 1];

// rowsum(out * dout) of the block's rows; heads are neighbours in memory.
template <class Element, int kValueDim>
MAGI_DEVICE void make_deltas(const BwdPrepareArgs& args, PrepareDeltas& deltas) {
  constexpr int kLanes = kRowLanes<kValueDim>;
  constexpr int kRowsAtOnce = kPrepareThreads / kLanes;
  const int lane = threadIdx.x % kLanes;
#pragma unroll 4
  for (int i = 0; i < kPrepareThreads / kRowsAtOnce; ++i) {
    const int row = i * kRowsAtOnce + threadIdx.x / kLanes;
    const int token = blockIdx.x * kPrepareTokens + row / kPrepareHeads;
    const int head = blockIdx.y * kPrepareHeads + row % kPrepareHeads;
    const bool inside = token < args.num_q && head < args.num_heads_q;
    const float sum =
        sum_over_lanes<kLanes>(inside && has_elements<kValueDim>(lane)
                                   ? dot8<Element>(args.out, args.dout, token, head, 8 * lane)
                                   : 0.f);
    if (lane == 0) deltas[row % kPrepareHeads][row / kPrepareHeads] = sum;
  }
  __syncthreads();
}

// All threads of the launch clear a part.
MAGI_DEVICE void clear(const BwdCleared& cleared) {
  const int64_t block = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
  const int64_t thread = block * kPrepareThreads + threadIdx.x;
  const int64_t num_threads = int64_t{gridDim.x} * gridDim.y * kPrepareThreads;
  for (int64_t i = thread; i < cleared.count / 4; i += num_threads)
    reinterpret_cast<uint4*>(cleared.words)[i] = {0, 0, 0, 0};
  if (thread < cleared.count % 4) cleared.words[cleared.count - 1 - thread] = 0;
}

// With softcap, -lse * log2(e) of the rows whose cells a thread of the main kernel holds in
// neighbouring registers. Rows behind the end are never used, but they are read.
MAGI_DEVICE uint4 capped_shifts(const BwdPrepareArgs& args, int first, int head) {
  const auto of = [&](int row) {
    const int token = first + row;
    if (token >= args.num_q) return 0u;
    const float lse = args.lse[token * args.lse_stride_token + head * args.lse_stride_head];
    return __float_as_uint(lse != -INFINITY ? lse * -kLog2e : -INFINITY);
  };
  return {of(0), of(1), of(8), of(9)};
}

// A block makes the stats of 32 tokens x 8 heads: numbers are read where heads are neighbours and
// written where tokens are.
template <class Element, int kValueDim, bool kSoftcap>
__global__ __launch_bounds__(kPrepareThreads) void bwd_prepare_kernel(BwdPrepareArgs args) {
  __shared__ PrepareDeltas deltas;
  clear(args.cleared[0]);
  clear(args.cleared[1]);
  if (args.out.data != nullptr) make_deltas<Element, kValueDim>(args, deltas);
  const int slot = threadIdx.x % kPrepareTokens, head_slot = threadIdx.x / kPrepareTokens;
  const int token = blockIdx.x * kPrepareTokens + slot;
  const int head = blockIdx.y * kPrepareHeads + head_slot;
  if (token >= args.stat_rows || head >= args.num_heads_q) return;
  float shift = 0.f, delta = 0.f;  // rows behind the end are never used, but they are read
  if (token < args.num_q) {
    const float lse = args.lse[token * args.lse_stride_token + head * args.lse_stride_head];
    const bool sees = lse != -INFINITY;
    shift = sees ? (args.log_of_factor - lse) / args.softmax_scale : kHidden;
    // A row that sees nothing takes no part; its delta may be infinite (a gradient of its lse).
    if (sees)
      delta = args.out.data != nullptr
                  ? deltas[head_slot][slot]
                  : args.delta[token * args.delta_stride_token + head * args.delta_stride_head];
  }
  const int64_t row = static_cast<int64_t>(head) * args.stat_rows + token;
  if constexpr (kSoftcap)
    args.stats[row] = capped_shifts(args, token, head);
  else
    args.stats[row] = split_stat<Element>(shift);
  args.stats[static_cast<int64_t>(args.num_heads_q) * args.stat_rows + row] =
      split_stat<Element>(-delta);
}

// Makes 8 neighbouring elements of a row.
template <class Element>
MAGI_DEVICE void convert8(const BwdConvertJob& args, int64_t token, int64_t head, int col) {
  const float* src = static_cast<const float*>(args.src.data) + token * args.src.stride_token +
                     head * args.src.stride_head + col;
  float sum[8] = {};
  for (int part = 0; part < args.num_parts; ++part) {
    const float4 a = *reinterpret_cast<const float4*>(src + part * args.part_stride);
    const float4 b = *reinterpret_cast<const float4*>(src + part * args.part_stride + 4);
    sum[0] += a.x, sum[1] += a.y, sum[2] += a.z, sum[3] += a.w;
    sum[4] += b.x, sum[5] += b.y, sum[6] += b.z, sum[7] += b.w;
  }
  const int64_t out = token * args.dst.stride_token + head * args.dst.stride_head + col;
  if (args.dst_is_fp32) {
    float4* dst = reinterpret_cast<float4*>(static_cast<float*>(args.dst.data) + out);
    dst[0] = {sum[0], sum[1], sum[2], sum[3]};
    dst[1] = {sum[4], sum[5], sum[6], sum[7]};
  } else {
    *reinterpret_cast<uint4*>(static_cast<Element*>(args.dst.data) + out) = {
        ptx::pack2<Element>(sum[0], sum[1]), ptx::pack2<Element>(sum[2], sum[3]),
        ptx::pack2<Element>(sum[4], sum[5]), ptx::pack2<Element>(sum[6], sum[7])};
  }
}

// Those of thread `index` of a job.
template <class Element, int kWidth>
MAGI_DEVICE void convert_elements(const BwdConvertJob& args, int64_t index) {
  constexpr int kLanes = kWidth / 8;
  const int64_t row = index / kLanes;
  const int64_t token = row / args.num_heads, head = row % args.num_heads;
  if (token >= args.num_tokens) return;
  convert8<Element>(args, token, head, static_cast<int>(index % kLanes) * 8);
}

template <class Element, int kHeadDim, int kValueDim>
__global__ __launch_bounds__(256) void bwd_convert_kernel(
    const __grid_constant__ BwdConvertArgs all) {
  int job = 0;
  while (static_cast<int>(blockIdx.x) >= all.jobs[job].end_block) ++job;
  const BwdConvertJob& args = all.jobs[job];
  const int block = blockIdx.x - (job > 0 ? all.jobs[job - 1].end_block : 0);
  const int64_t index = block * int64_t{256} + threadIdx.x;
  if (kHeadDim == kValueDim || args.width == kHeadDim)
    convert_elements<Element, kHeadDim>(args, index);
  else
    convert_elements<Element, kValueDim>(args, index);
}

}  // namespace magi
