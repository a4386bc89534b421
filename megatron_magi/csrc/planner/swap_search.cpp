#include "planner/swap_search.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "planner/assignment.h"
#include "planner/dispatch.h"
#include "planner/rebalance.h"
#include "planner/rng.h"

namespace magi {
namespace {

constexpr uint64_t kSeed = 20261121;
constexpr int64_t kCoarsest = 8;            // chunks of the largest block
constexpr int64_t kMaxReads = 300'000'000;  // segments per level: a bound on time
// Counts changed per level: another bound on time. If chunks read nearly the same keys, as in a
// full mask, trades cost no rows and nearly all of them are made.
constexpr int64_t kMaxWrites = 10'000'000'000;
constexpr int64_t kHardPrice = 1'000'000'000'000;  // rows per tile: more than a trade can save
constexpr int64_t kMostRows = INT64_MAX / 4;       // the highest fine, so that sums cannot overflow

// Shares of the trials in percent. These and the numbers below are the best of a few values that
// were tried on the packs of benchmarks/planner/plans.py.
constexpr int64_t kCoarseShare = 30;  // all coarse levels together
constexpr int64_t kHardShare = 30;    // single chunks under the hard cap

struct Schedule {
  int64_t trials = 0;
  int64_t threshold = 0;    // rows a trade may cost at first; falls to 0 quadratically
  int64_t price_begin = 0;  // rows per tile of misfit; rises quadratically
  int64_t price_end = 0;
};

// A chunk `a` and the chunk that it trades places with, or -1.
struct Trade {
  int32_t a = -1;
  int32_t b = -1;
};

class Proposer {
 public:
  Proposer(const Assignment& state, Rng& rng) : state_(state), rng_(rng) {}

  Trade next() {
    const int32_t a = static_cast<int32_t>(rng_.below(state_.num_chunks()));
    // Three in five proposals go to the rank of a neighbour, which is likely to hold the document.
    const int32_t target = percent() < 60 ? neighbour_rank(a) : random_rank();
    if (target < 0 || target == state_.rank(a)) return {};
    const int64_t kind = percent();
    if (kind < 40) return {a, returning(target, a)};
    if (kind < 70) return {a, best_fit(target, a)};
    return {a, random_member(target)};
  }

 private:
  int64_t percent() { return rng_.below(100); }
  int32_t random_rank() { return static_cast<int32_t>(rng_.below(state_.cp_size())); }
  int32_t random_member(int32_t rank) {
    return state_.member(rank, rng_.below(state_.chunks_per_rank()));
  }

  bool on(int32_t chunk, int32_t rank) const {
    return chunk >= 0 && chunk < state_.num_chunks() && state_.rank(chunk) == rank;
  }

  int32_t neighbour_rank(int32_t a) {
    const int32_t neighbour = rng_.below(2) != 0 ? a + 1 : a - 1;
    return neighbour < 0 || neighbour >= state_.num_chunks() ? -1 : state_.rank(neighbour);
  }

  // A chunk of `target` with a neighbour, other than `a`, on the rank of `a`.
  int32_t returning(int32_t target, int32_t a) {
    const int64_t per_rank = state_.chunks_per_rank();
    const int64_t first = rng_.below(per_rank);
    for (int64_t i = 0; i < per_rank; ++i) {
      const int64_t at = first + i < per_rank ? first + i : first + i - per_rank;
      const int32_t b = state_.member(target, at);
      if ((b - 1 != a && on(b - 1, state_.rank(a))) || (b + 1 != a && on(b + 1, state_.rank(a)))) {
        return b;
      }
    }
    return -1;
  }

  // The one of six random chunks of `target` that gives the best loads.
  int32_t best_fit(int32_t target, int32_t a) {
    int32_t best = random_member(target);
    int64_t best_delta = state_.misfit_delta(a, best);
    for (int i = 1; i < 6; ++i) {
      const int32_t b = random_member(target);
      const int64_t delta = state_.misfit_delta(a, b);
      if (delta < best_delta) {
        best = b;
        best_delta = delta;
      }
    }
    return best;
  }

  const Assignment& state_;
  Rng& rng_;
};

// Leaves `state` at the best point found, by rows plus misfit at the final price.
void anneal(Assignment& state, const Schedule& schedule, Rng& rng) {
  const auto cost = [&] { return state.traffic().total() + schedule.price_end * state.misfit(); };
  std::vector<int32_t> best = state.ranks();
  int64_t best_cost = cost();
  Proposer proposer(state, rng);
  const int64_t trials = schedule.trials;
  int64_t threshold = 0, price = 0, most = 0;
  const auto is_in_budget = [&] {
    return state.traffic().reads() < kMaxReads && state.traffic().writes() < kMaxWrites;
  };
  for (int64_t trial = 0; trial < trials && is_in_budget(); ++trial) {
    if (trial % 64 == 0) {
      const int64_t left = trials - trial;
      threshold = schedule.threshold * left / trials * left / trials;
      price = schedule.price_begin +
              (schedule.price_end - schedule.price_begin) * trial / trials * trial / trials;
      most = kMostRows / price;  // tiles
    }
    const auto [a, b] = proposer.next();
    if (b < 0) continue;
    const int64_t fine = price * std::clamp(state.misfit_delta(a, b), -most, most);
    if (fine > threshold + 2 * schedule.threshold) continue;  // no saving in rows makes up for it
    const int64_t delta = state.traffic_delta(a, b);
    if (delta + fine > threshold) continue;
    state.swap(a, b, delta);
    if (cost() < best_cost) {
      best_cost = cost();
      best = state.ranks();
    }
  }
  if (best != state.ranks()) state.assign(std::move(best));
}

// Block sizes in chunks, coarse to fine; the last one is 1, and a rank has at least two blocks.
std::vector<int64_t> block_sizes(int64_t chunks_per_rank) {
  std::vector<int64_t> sizes{1};
  for (int64_t m = 2; m <= kCoarsest && chunks_per_rank % m == 0 && chunks_per_rank / m >= 2;
       m *= 2) {
    sizes.insert(sizes.begin(), m);
  }
  return sizes;
}

std::vector<int32_t> refine(std::span<const int32_t> ranks, int64_t parts) {
  std::vector<int32_t> finer(ranks.size() * parts);
  for (size_t i = 0; i < finer.size(); ++i) finer[i] = ranks[i / parts];
  return finer;
}

}  // namespace

int64_t default_swap_trials(int64_t num_chunks) {
  return std::min(700 * num_chunks, 100'000 + 150 * num_chunks);
}

std::vector<int32_t> swap_search(const SwapProblem& problem, std::vector<int32_t> start) {
  const auto& [segments, chunk_loads, cp_size, chunk_size, max_load, trials] = problem;
  const int64_t chunks_per_rank = static_cast<int64_t>(start.size()) / cp_size;
  const int64_t mean = std::reduce(chunk_loads.begin(), chunk_loads.end()) / cp_size;
  // Prices in rows per tile, in proportion to a rank's rows over its tiles.
  const auto price = [&](int64_t factor) {
    return factor * chunks_per_rank * chunk_size / std::max<int64_t>(1, mean) + 1;
  };

  Rng rng(kSeed);
  const std::vector<int64_t> start_loads = rank_loads(chunk_loads, start, cp_size);
  const LoadLimits hard{0, std::max(max_load, std::ranges::max(start_loads))};
  const LoadLimits soft{mean - 2 * std::max(hard.cap - mean, mean / 200), hard.cap};
  Assignment state(segments, chunk_loads, cp_size, soft, start);
  const int64_t start_rows = state.traffic().total();
  if (start_rows == 0 || trials <= 0) return start;

  // 1. Trade blocks, coarse to fine, with soft limits.
  const std::vector<int64_t> sizes = block_sizes(chunks_per_rank);
  const int64_t num_coarse = static_cast<int64_t>(sizes.size()) - 1;
  std::vector<int32_t> ranks;
  int64_t percent = 400;  // of a block's rows, for the threshold
  for (int64_t level = 0; level < num_coarse; ++level) {
    const int64_t size = sizes[level];
    const Segments blocks = coarsen(segments, size);
    const std::vector<int64_t> loads = sum_groups(chunk_loads, size);
    if (level == 0) ranks = dispatch_lpt(loads, cp_size);
    Assignment coarse(blocks, loads, cp_size, soft, std::move(ranks));
    anneal(coarse,
           {trials * kCoarseShare / 100 / num_coarse, chunk_size * size * percent / 100, price(10),
            price(100)},
           rng);
    ranks = refine(coarse.ranks(), size / sizes[level + 1]);
    percent = percent * 7 / 10;
  }

  // 2. Trade single chunks, with soft limits at first, then with a hard cap.
  if (num_coarse > 0) state.assign(std::move(ranks));
  const int64_t soft_share = 100 - kHardShare - (num_coarse > 0 ? kCoarseShare : 0);
  anneal(state, {trials * soft_share / 100, chunk_size * percent / 100, price(10), price(1000)},
         rng);
  bool fits = false;
  for (int attempt = 0; !fits && attempt < 3; ++attempt) {
    if (attempt > 0) {
      state.set_limits(soft);
      anneal(state, {trials / 10, chunk_size, price(1000), price(10000)}, rng);
    }
    state.set_limits(hard);
    fits = repair(state, price(30), rng);
  }
  if (!fits) state.assign(start);
  anneal(state, {trials * kHardShare / 100, chunk_size, kHardPrice, kHardPrice}, rng);
  return state.misfit() == 0 && state.traffic().total() < start_rows ? state.ranks() : start;
}

}  // namespace magi
