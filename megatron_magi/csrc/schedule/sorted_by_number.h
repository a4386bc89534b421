// Sorts by a small whole number. Long lists have few different numbers, so counting takes a third
// of the time of comparing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace magi {

// Items of the least number first, and those of equal numbers in the order they had. `number_of`
// gives a number from 0 to `most`.
template <class T, class F>
std::vector<T> sorted_by_number(const std::vector<T>& items, int32_t most, F&& number_of) {
  std::vector<size_t> place(static_cast<size_t>(most) + 2);
  for (const T& item : items) ++place[static_cast<size_t>(number_of(item)) + 1];
  for (size_t i = 1; i < place.size(); ++i) place[i] += place[i - 1];
  std::vector<T> sorted(items.size());
  for (const T& item : items) sorted[place[static_cast<size_t>(number_of(item))]++] = item;
  return sorted;
}

}  // namespace magi
