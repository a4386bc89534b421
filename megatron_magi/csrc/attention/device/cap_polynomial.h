// tanh of small numbers without the instruction for it, as the host prepares it for kernels with
// softcap.
#pragma once
#include <cmath>

namespace magi {

// unit * tanh(scale * score) as score * (c[0] + c[1] score^2 + ...). It grows with the score
// everywhere.
struct CapPolynomial {
  static constexpr int kTerms = 3;
  float bound;  // of the size of scores
  float c[kTerms];

#if defined(__CUDACC__)
  __device__ __forceinline__ float of(float score) const {
    const float square = score * score;
    float sum = c[kTerms - 1];
#pragma unroll
    for (int i = kTerms - 2; i >= 0; --i) sum = fmaf(sum, square, c[i]);
    return score * sum;
  }
#endif
};

// The polynomial of this degree with the least greatest relative error to tanh up to kTanhBound:
// 2^-12, half of what the instruction for tanh may err.
constexpr double kTanhBound = 0.768;
constexpr double kTanh[CapPolynomial::kTerms] = {0.99975604, -0.32570322, 0.09599662};

inline CapPolynomial make_cap_polynomial(double scale, double unit) {
  CapPolynomial p{static_cast<float>(kTanhBound / std::abs(scale)), {}};
  double factor = unit * scale;
  for (int i = 0; i < CapPolynomial::kTerms; ++i, factor *= scale * scale) {
    p.c[i] = static_cast<float>(kTanh[i] * factor);
    if (!std::isnormal(p.c[i])) p.bound = -1.f;  // beyond fp32: no score is small
  }
  return p;
}

// unit * tanh(scale * score) for scores up to a smaller bound, of degree 3: score * (c[0] + c[1] *
// (score^2 + shift)). It errs by 2^-12 too, and does not grow beyond its range. It tells on the way
// which scores are out of range: a sum below `limit`, a power of two, has the exponent of `shift`,
// and no sum has a lower one.
struct SmallCapPolynomial {
  float shift, limit, c[2];

#if defined(__CUDACC__)
  // The sum of a score is what tells.
  __device__ __forceinline__ float sum(float score) const { return fmaf(score, score, shift); }
  __device__ __forceinline__ float of(float score, float sum) const {
    return score * fmaf(sum, c[1], c[0]);
  }
  // `bits`: those of any of the sums.
  __device__ __forceinline__ bool held(unsigned bits) const {
    return __uint_as_float(bits) < limit;
  }
#endif
};

constexpr double kSmallTanhBound = 0.352;
constexpr double kSmallTanh[2] = {0.99975748, -0.31752469};

inline SmallCapPolynomial make_small_cap_polynomial(double scale, double unit) {
  const double bound = kSmallTanhBound / std::abs(scale), square = bound * bound;
  const double limit = std::exp2(std::ceil(std::log2(square)) + 1.);  // shift is above half of it
  const double shift = limit - square, c1 = kSmallTanh[1] * unit * scale * scale * scale;
  const double c0 = kSmallTanh[0] * unit * scale - c1 * shift;
  SmallCapPolynomial p{static_cast<float>(shift),
                       static_cast<float>(limit),
                       {static_cast<float>(c0), static_cast<float>(c1)}};
  for (const float x : {p.shift, p.limit, p.c[0], p.c[1]})
    if (!std::isnormal(x)) p.limit = 0.f;  // beyond fp32: it never holds
  return p;
}

}  // namespace magi
