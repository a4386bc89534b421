// Deterministic random numbers: the same sequence with every compiler and library.
#pragma once

#include <cstdint>

#include "planner/hash.h"

namespace magi {

class Rng {  // splitmix64 (Steele, Lea, Flood 2014)
 public:
  explicit Rng(uint64_t seed) : state_(seed) {}

  uint64_t next() { return mix64(state_ += 0x9e3779b97f4a7c15ULL); }

  // Uniform in [0, bound) up to a bias of bound / 2^32; bound <= 2^32.
  uint32_t below(uint64_t bound) { return static_cast<uint32_t>((next() >> 32) * bound >> 32); }

 private:
  uint64_t state_;
};

}  // namespace magi
