// A set of whole numbers from 0 up to a bound that finds neighbours fast: a bit for each number,
// and a bit for each word that has some.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

namespace magi {

class NumberSet {
 public:
  // An empty set of numbers up to `last`.
  explicit NumberSet(int64_t last) : bits_(words(last)), filled_(words(last / kWord)) {}

  bool has(int64_t x) const { return (bits_[at(x)] & bit(x)) != 0; }
  void add(int64_t x) {
    bits_[at(x)] |= bit(x);
    filled_[at(x / kWord)] |= bit(x / kWord);
  }
  void remove(int64_t x) {
    bits_[at(x)] &= ~bit(x);
    if (bits_[at(x)] == 0) filled_[at(x / kWord)] &= ~bit(x / kWord);
  }

  // The least number above x, which must exist.
  int64_t next(int64_t x) const {
    const uint64_t rest = above(bits_, x);
    if (rest != 0) return x / kWord * kWord + std::countr_zero(rest);
    int64_t i = x / kWord / kWord;
    uint64_t words = above(filled_, x / kWord);
    while (words == 0) words = filled_[static_cast<size_t>(++i)];
    const int64_t word = i * kWord + std::countr_zero(words);
    return word * kWord + std::countr_zero(bits_[static_cast<size_t>(word)]);
  }
  // The greatest number below x, which must exist.
  int64_t previous(int64_t x) const {
    const uint64_t rest = below(bits_, x);
    if (rest != 0) return x / kWord * kWord + top(rest);
    int64_t i = x / kWord / kWord;
    uint64_t words = below(filled_, x / kWord);
    while (words == 0) words = filled_[static_cast<size_t>(--i)];
    const int64_t word = i * kWord + top(words);
    return word * kWord + top(bits_[static_cast<size_t>(word)]);
  }

 private:
  static constexpr int64_t kWord = 64;
  using Words = std::vector<uint64_t>;

  static size_t words(int64_t last) { return static_cast<size_t>(last / kWord + 1); }
  static size_t at(int64_t x) { return static_cast<size_t>(x / kWord); }
  static uint64_t bit(int64_t x) { return uint64_t{1} << (x % kWord); }
  static int64_t top(uint64_t word) { return std::bit_width(word) - 1; }
  // The bits of x's word that stand for greater numbers, and for smaller ones.
  static uint64_t above(const Words& of, int64_t x) { return of[at(x)] & ~(2 * bit(x) - 1); }
  static uint64_t below(const Words& of, int64_t x) { return of[at(x)] & (bit(x) - 1); }

  Words bits_, filled_;
};

}  // namespace magi
