#include "planner/dispatch.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>

namespace magi {

std::vector<int32_t> dispatch_lpt(std::span<const int64_t> loads, int64_t cp_size) {
  std::vector<int32_t> order(loads.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater<>{}, [&](int32_t c) { return loads[c]; });

  using Entry = std::pair<int64_t, int32_t>;  // (load, rank)
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> least_loaded;
  for (int32_t rank = 0; rank < cp_size; ++rank) least_loaded.push({0, rank});

  const int64_t capacity = static_cast<int64_t>(loads.size()) / cp_size;
  std::vector<int64_t> counts(cp_size);
  std::vector<int32_t> ranks(loads.size());
  for (const int32_t chunk : order) {
    const auto [load, rank] = least_loaded.top();
    least_loaded.pop();
    ranks[chunk] = rank;
    if (++counts[rank] < capacity) least_loaded.push({load + loads[chunk], rank});
  }
  return ranks;
}

std::vector<int64_t> rank_loads(std::span<const int64_t> loads, std::span<const int32_t> ranks,
                                int64_t cp_size) {
  std::vector<int64_t> sums(cp_size);
  for (size_t c = 0; c < loads.size(); ++c) sums[ranks[c]] += loads[c];
  return sums;
}

}  // namespace magi
