#include "planner/rebalance.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

namespace magi {
namespace {

constexpr int64_t kMaxLooks = 20'000'000;  // chunks looked at: a bound on time for huge problems
constexpr int64_t kMaxPairs = 128 * 128;   // chunk pairs of two ranks that trade_twice sorts
constexpr int64_t kMostSteps = 1000;       // trades, or pairs of them
constexpr int64_t kMostFailures = 16;      // of the search for two trades, which takes longest
constexpr int64_t kFullest = 4;            // ranks considered per step, and emptiest ones
constexpr int64_t kPerChunk = 4;           // trades compared per chunk of such a rank

struct Trade {
  int32_t a = -1;
  int32_t b = -1;
};

// Finds chunks by load, so that only trades that move about the right number of tiles are tried.
class ByLoad {
 public:
  explicit ByLoad(const Assignment& state) : state_(state), chunks_(state.num_chunks()) {
    std::iota(chunks_.begin(), chunks_.end(), 0);
    std::ranges::stable_sort(chunks_, {}, [&](int32_t c) { return state.chunk_load(c); });
  }

  // Appends up to kPerChunk trades of `a` with chunks of other ranks whose load lies in
  // [lowest, highest], the one nearest below or at `highest` first, as far as `good` accepts them.
  template <typename Good>
  void collect(int32_t a, int64_t lowest, int64_t highest, std::vector<Trade>& trades,
               Good good) const {
    const auto load_of = [&](int32_t c) { return state_.chunk_load(c); };
    auto at = std::ranges::upper_bound(chunks_, highest, {}, load_of);
    for (int64_t found = 0; found < kPerChunk && at != chunks_.begin();) {
      const int32_t b = *--at;
      ++looks_;
      if (load_of(b) < lowest) return;
      if (state_.rank(b) == state_.rank(a) || !good(b)) continue;
      trades.push_back({a, b});
      ++found;
    }
  }

  int64_t looks() const { return looks_; }

 private:
  const Assignment& state_;
  std::vector<int32_t> chunks_;  // by rising load
  mutable int64_t looks_ = 0;
};

// Trades a heavier chunk of the overloaded `rank` for a lighter one of a rank with room.
void collect_giving(const Assignment& state, const ByLoad& by_load, int32_t rank, int64_t room,
                    std::vector<Trade>& trades) {
  const int64_t excess = state.load(rank) - state.limits().cap;
  for (int64_t i = 0; i < state.chunks_per_rank(); ++i) {
    const int32_t a = state.member(rank, i);
    const auto good = [&](int32_t b) { return state.misfit_delta(a, b) < 0; };
    const int64_t load = state.chunk_load(a);
    by_load.collect(a, load - excess - room, load - excess, trades, good);  // all of it, or more
    by_load.collect(a, load - excess + 1, load - 1, trades, good);          // a part of it
  }
}

// Trades a lighter chunk of the underloaded `rank` for a heavier one of any fuller rank.
void collect_lifting(const Assignment& state, const ByLoad& by_load, int32_t rank,
                     std::vector<Trade>& trades) {
  const int64_t room = state.limits().cap - state.load(rank);
  for (int64_t i = 0; i < state.chunks_per_rank(); ++i) {
    const int32_t a = state.member(rank, i);
    const int64_t load = state.chunk_load(a);
    by_load.collect(a, load + 1, load + room, trades, [&](int32_t b) {
      return state.chunk_load(b) - load < state.load(state.rank(b)) - state.load(rank);
    });
  }
}

// Makes two trades at once with one rank that has room. Together they remove the excess of the
// overloaded `rank`, or most of it, if no single trade does: a rank that holds only the heaviest
// and the lightest chunks may find no slightly lighter chunk on any other rank. Returns whether
// trades were made.
bool trade_twice(Assignment& state, int32_t rank, Rng& rng) {
  struct Move {
    int64_t tiles;  // that leave `rank`
    Trade trade;
  };
  const int64_t excess = state.load(rank) - state.limits().cap;
  const int64_t per_rank = state.chunks_per_rank();
  if (per_rank * per_rank > kMaxPairs) return false;
  const int32_t cp_size = static_cast<int32_t>(state.cp_size());
  const int32_t first = static_cast<int32_t>(rng.below(cp_size));
  std::vector<Move> moves;
  for (int32_t i = 0; i < cp_size; ++i) {
    const int32_t other = (first + i) % cp_size;
    const int64_t room = state.limits().cap - state.load(other);
    if (room <= 0) continue;
    moves.clear();
    for (int64_t j = 0; j < per_rank * per_rank; ++j) {
      const Trade trade{state.member(rank, j / per_rank), state.member(other, j % per_rank)};
      moves.push_back({state.chunk_load(trade.a) - state.chunk_load(trade.b), trade});
    }
    std::ranges::stable_sort(moves, {}, &Move::tiles);
    for (const Move& one : moves) {
      // The fewest tiles that remove the excess, or as many as there is room for.
      const int64_t wanted = std::min(excess, room) - one.tiles;
      auto two = std::ranges::lower_bound(moves, wanted, {}, &Move::tiles);
      while (two != moves.end() && (two->trade.a == one.trade.a || two->trade.b == one.trade.b)) {
        ++two;
      }
      if (two == moves.end() || one.tiles + two->tiles > room) continue;
      for (const Trade& trade : {one.trade, two->trade}) {
        state.swap(trade.a, trade.b, state.traffic_delta(trade.a, trade.b));
      }
      return true;
    }
  }
  return false;
}

}  // namespace

bool repair(Assignment& state, int64_t price, Rng& rng) {
  const int64_t cap = state.limits().cap;
  const int32_t cp_size = static_cast<int32_t>(state.cp_size());
  const ByLoad by_load(state);
  std::vector<int32_t> order(cp_size);
  std::vector<Trade> trades;
  int64_t failures = 0;  // of trade_twice, which costs most
  for (int64_t step = 0; state.misfit() > 0 && step < kMostSteps && by_load.looks() < kMaxLooks;
       ++step) {
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, std::greater<>{}, [&](int32_t r) { return state.load(r); });
    const int64_t room = cap - state.load(order.back());
    // 1. Collect trades that relieve the fullest rank for which there are any, or else trades that
    //    fill one of the emptiest ranks.
    trades.clear();
    for (int32_t i = 0; i < std::min<int32_t>(cp_size, kFullest) && trades.empty(); ++i) {
      if (state.load(order[i]) > cap) collect_giving(state, by_load, order[i], room, trades);
    }
    if (trades.empty() && failures < kMostFailures) {
      if (trade_twice(state, order[0], rng)) continue;
      ++failures;
    }
    if (trades.empty()) {
      const int64_t emptiest = rng.below(std::min<int64_t>(cp_size, kFullest));
      collect_lifting(state, by_load, order[cp_size - 1 - emptiest], trades);
    }
    // 2. Make the cheapest trade.
    int64_t best_cost = std::numeric_limits<int64_t>::max(), best_rows = 0;
    Trade best;
    for (const Trade& trade : trades) {
      const int64_t rows = state.traffic_delta(trade.a, trade.b);
      const int64_t cost = rows + price * state.misfit_delta(trade.a, trade.b);
      if (cost >= best_cost) continue;
      best_cost = cost;
      best_rows = rows;
      best = trade;
    }
    if (best.a >= 0) state.swap(best.a, best.b, best_rows);
  }
  return state.misfit() == 0;
}

std::vector<int32_t> balance(std::span<const int64_t> chunk_loads, int64_t cp_size, int64_t cap,
                             std::vector<int32_t> ranks) {
  Segments none;
  none.of_chunk.begin.resize(chunk_loads.size() + 1);
  Rng rng(0);
  Assignment state(none, chunk_loads, cp_size, {0, cap}, ranks);
  return repair(state, 1, rng) ? state.ranks() : ranks;
}

}  // namespace magi
