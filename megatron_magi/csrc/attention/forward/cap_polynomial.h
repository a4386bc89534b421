// Softcap of small scores, as the host prepares it.
#pragma once
#include <cmath>

namespace magi {

// softcap * log2(e) * tanh(softmax_scale * score / softcap) as score * (c[0] + c[1] score^2 + ...).
struct CapPolynomial {
  static constexpr int kTerms = 3;
  float bound;  // of the size of scores
  float c[kTerms];
};

// The polynomial of this degree with the least greatest relative error to tanh up to kTanhBound:
// 2^-12, half of what the instruction for tanh may err.
constexpr double kTanhBound = 0.768;
constexpr double kTanh[CapPolynomial::kTerms] = {0.99975604, -0.32570322, 0.09599662};

inline CapPolynomial make_cap_polynomial(double softmax_scale, double softcap, double log2e) {
  const double to_tanh = softmax_scale / softcap;
  CapPolynomial p{static_cast<float>(kTanhBound / std::abs(to_tanh)), {}};
  double factor = softcap * log2e * to_tanh;
  for (int i = 0; i < CapPolynomial::kTerms; ++i, factor *= to_tanh * to_tanh) {
    p.c[i] = static_cast<float>(kTanh[i] * factor);
    if (!std::isnormal(p.c[i])) p.bound = -1.f;  // beyond fp32: no score is small
  }
  return p;
}

}  // namespace magi
