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

// Likewise of degree 3, for scores up to a smaller bound; it errs by 2^-12 too.
struct SmallCapPolynomial {
  float bound, c[2];

#if defined(__CUDACC__)
  __device__ __forceinline__ float of(float score) const {
    return score * fmaf(score * score, c[1], c[0]);
  }
#endif
};

constexpr double kSmallTanhBound = 0.352;
constexpr double kSmallTanh[2] = {0.99975748, -0.31752469};

inline SmallCapPolynomial make_small_cap_polynomial(double scale, double unit) {
  const double linear = kSmallTanh[0] * unit * scale;
  const double cubic = kSmallTanh[1] * unit * scale * scale * scale;
  SmallCapPolynomial p{static_cast<float>(kSmallTanhBound / std::abs(scale)),
                       {static_cast<float>(linear), static_cast<float>(cubic)}};
  if (!std::isnormal(p.c[0]) || !std::isnormal(p.c[1])) p.bound = -1.f;  // as above
  return p;
}

}  // namespace magi
