// The band test, once for host and device. A slice is a rectangle cut by a diagonal band:
// cell (q, k) is visible iff q_start <= q < q_end, k_start <= k < k_end, d_lo <= k - q <= d_hi.
// So the keys a row sees are one interval.
// Slices are canonical: bounds are finite and k - q, q + d never leave int32.
#pragma once

#if defined(__CUDACC__)
#define MAGI_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MAGI_HOST_DEVICE inline
#endif

namespace magi {

struct Interval {
  int begin, end;  // empty when begin >= end
};

struct Band {
  int q_start, q_end, k_start, k_end, d_lo, d_hi;

  // Keys that row q sees.
  MAGI_HOST_DEVICE Interval keys_of(int q) const {
    int begin = q + d_lo > k_start ? q + d_lo : k_start;
    int end = q + d_hi + 1 < k_end ? q + d_hi + 1 : k_end;
    return q >= q_start && q < q_end ? Interval{begin, end} : Interval{0, 0};
  }
  // Rows that see key k, likewise one interval.
  MAGI_HOST_DEVICE Interval rows_of(int k) const {
    int begin = k - d_hi > q_start ? k - d_hi : q_start;
    int end = k - d_lo + 1 < q_end ? k - d_lo + 1 : q_end;
    return k >= k_start && k < k_end ? Interval{begin, end} : Interval{0, 0};
  }
  // The same band in coordinates whose origin is (q0, k0).
  MAGI_HOST_DEVICE Band relative_to(int q0, int k0) const {
    return {q_start - q0, q_end - q0, k_start - k0, k_end - k0, d_lo - (k0 - q0), d_hi - (k0 - q0)};
  }
};

}  // namespace magi
