// A 64-bit hash that is the same on every machine and in every version of the plan format.
// It is not cryptographic: it distinguishes masks and plans that differ by accident. It takes a
// third of the time of blake2b on any size, and of sha256 on small ones; plan digests depend on it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace magi {

inline uint64_t mix64(uint64_t x) {  // finaliser of splitmix64 (Steele, Lea, Flood 2014)
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// Bytes are read as little-endian 64-bit words; length and seed enter the state.
inline uint64_t hash64(std::span<const std::byte> bytes, uint64_t seed = 0) {
  constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ULL;
  uint64_t state = mix64(seed + kGolden) ^ (bytes.size() * kGolden);
  for (size_t at = 0; at < bytes.size(); at += 8) {
    uint64_t word = 0;
    const size_t count = bytes.size() - at < 8 ? bytes.size() - at : 8;
    for (size_t i = 0; i < count; ++i) {
      word |= static_cast<uint64_t>(bytes[at + i]) << (8 * i);
    }
    state = mix64((state ^ word) + kGolden);
  }
  return mix64(state + kGolden);
}

}  // namespace magi
