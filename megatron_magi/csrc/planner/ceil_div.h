#pragma once

#include <cstdint>

namespace magi {

// The number of pieces of size `b` that cover `a`; `a` is at least 0, `b` positive.
constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace magi
