#pragma once

#include <cstdint>

namespace magi {

// How many pieces of `b` it takes to cover `a`; both at least 0, `b` positive.
constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace magi
