#include "planner/kind_balance.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <tuple>
#include <utility>

#include "planner/dispatch.h"

namespace magi {
namespace {

constexpr int64_t kMaxLooks = 20'000'000;  // trades looked at: a bound on time
constexpr size_t kCompared = 16;           // trades whose rows are compared in a step

struct Trade {
  int64_t excess = 0;  // change of the excess
  int32_t a = -1;
  int32_t b = -1;
};

// The ranks of the chunks, their loads of every kind, and the rows to transfer.
class State {
 public:
  State(const Segments& segments, std::span<const LayerKind> kinds, int64_t cp_size,
        std::vector<int32_t> ranks)
      : kinds_(kinds), ranks_(std::move(ranks)), traffic_(segments, cp_size) {
    for (const LayerKind& kind : kinds) {
      loads_.push_back(rank_loads(kind.chunk_loads, ranks_, cp_size));
    }
    traffic_.assign(ranks_);
  }

  const std::vector<int32_t>& ranks() const { return ranks_; }
  int32_t num_chunks() const { return static_cast<int32_t>(ranks_.size()); }

  // Tiles of a rank above the caps.
  int64_t excess(int32_t rank) const {
    int64_t sum = 0;
    for (size_t k = 0; k < kinds_.size(); ++k) sum += over(k, loads_[k][rank]);
    return sum;
  }

  // The change that a trade of chunks a and b, on different ranks, would make.
  int64_t excess_delta(int32_t a, int32_t b) const {
    int64_t sum = 0;
    for (size_t k = 0; k < kinds_.size(); ++k) {
      const int64_t moved = kinds_[k].chunk_loads[a] - kinds_[k].chunk_loads[b];
      const int64_t load_a = loads_[k][ranks_[a]], load_b = loads_[k][ranks_[b]];
      sum += over(k, load_a - moved) + over(k, load_b + moved) - over(k, load_a) - over(k, load_b);
    }
    return sum;
  }
  int64_t rows_delta(int32_t a, int32_t b) const {
    return traffic_.swap_delta(a, ranks_[a], b, ranks_[b]);
  }

  void swap(int32_t a, int32_t b, int64_t rows_delta) {
    for (size_t k = 0; k < kinds_.size(); ++k) {
      const int64_t moved = kinds_[k].chunk_loads[a] - kinds_[k].chunk_loads[b];
      loads_[k][ranks_[a]] -= moved;
      loads_[k][ranks_[b]] += moved;
    }
    traffic_.swap(a, ranks_[a], b, ranks_[b], rows_delta);
    std::swap(ranks_[a], ranks_[b]);
  }

 private:
  int64_t over(size_t kind, int64_t load) const {
    return std::max<int64_t>(0, load - kinds_[kind].cap);
  }

  std::span<const LayerKind> kinds_;
  std::vector<int32_t> ranks_;
  std::vector<std::vector<int64_t>> loads_;  // [kind][rank]
  Traffic traffic_;
};

// The trades of the rank's chunks that lower the excess most, at most kCompared.
std::vector<Trade> best_trades(const State& state, int32_t rank) {
  std::vector<Trade> trades;
  for (int32_t a = 0; a < state.num_chunks(); ++a) {
    if (state.ranks()[a] != rank) continue;
    for (int32_t b = 0; b < state.num_chunks(); ++b) {
      if (state.ranks()[b] == rank) continue;
      const int64_t excess = state.excess_delta(a, b);
      if (excess < 0) trades.push_back({excess, a, b});
    }
  }
  const size_t kept = std::min(trades.size(), kCompared);
  const auto key = [](const Trade& t) { return std::tuple(t.excess, t.a, t.b); };
  std::ranges::partial_sort(trades, trades.begin() + static_cast<int64_t>(kept), {}, key);
  trades.resize(kept);
  return trades;
}

// Makes the cheapest of the best trades of the rank with the largest excess that has any.
bool lower_excess(State& state, std::vector<int32_t>& order, int64_t& looks) {
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater<>{}, [&](int32_t r) { return state.excess(r); });
  std::vector<Trade> trades;
  for (const int32_t rank : order) {
    if (!trades.empty() || state.excess(rank) == 0) break;
    trades = best_trades(state, rank);
    looks += static_cast<int64_t>(state.num_chunks()) * state.num_chunks() /
             static_cast<int64_t>(order.size());
  }
  Trade best;
  int64_t fewest = INT64_MAX;
  for (const Trade& trade : trades) {
    const int64_t rows = state.rows_delta(trade.a, trade.b);
    if (rows < fewest) best = trade;
    fewest = std::min(fewest, rows);
  }
  if (best.a >= 0) state.swap(best.a, best.b, fewest);
  return best.a >= 0;
}

// Moves chunks to the rank of a neighbour, where fewer rows travel and no excess grows.
bool save_rows(State& state, int64_t& looks) {
  bool saved = false;
  for (int32_t a = 0; a < state.num_chunks(); ++a) {
    for (const int32_t neighbour : {a - 1, a + 1}) {
      if (neighbour < 0 || neighbour >= state.num_chunks()) continue;
      const int32_t target = state.ranks()[neighbour];
      for (int32_t b = 0; b < state.num_chunks() && state.ranks()[a] != target; ++b) {
        ++looks;
        if (b == neighbour || state.ranks()[b] != target || state.excess_delta(a, b) > 0) continue;
        const int64_t rows = state.rows_delta(a, b);
        if (rows >= 0) continue;
        state.swap(a, b, rows);
        saved = true;
      }
    }
  }
  return saved;
}

}  // namespace

int64_t sum_of_fullest(std::span<const LayerKind> kinds, std::span<const int32_t> ranks,
                       int64_t cp_size) {
  int64_t sum = 0;
  for (const LayerKind& kind : kinds) {
    sum += std::ranges::max(rank_loads(kind.chunk_loads, ranks, cp_size));
  }
  return sum;
}

std::vector<int32_t> balance_kinds(const Segments& segments, std::span<const LayerKind> kinds,
                                   int64_t cp_size, std::vector<int32_t> ranks) {
  State state(segments, kinds, cp_size, std::move(ranks));
  std::vector<int32_t> order(cp_size);
  int64_t looks = 0;
  while (looks < kMaxLooks && lower_excess(state, order, looks)) {
  }
  looks = 0;
  while (!segments.rows.empty() && looks < kMaxLooks && save_rows(state, looks)) {
  }
  return state.ranks();
}

}  // namespace magi
