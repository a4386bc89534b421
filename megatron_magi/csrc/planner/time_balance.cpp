#include "planner/time_balance.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "planner/assignment.h"
#include "planner/ceil_div.h"
#include "planner/dispatch.h"
#include "planner/loads.h"
#include "planner/rank_times.h"
#include "planner/repair.h"
#include "planner/rng.h"

namespace magi {
namespace {

constexpr int64_t kMaxRounds = 3;
constexpr int64_t kFewRanks = 16;       // with more ranks a round takes long, so there is one
constexpr int64_t kChunksPerRank = 16;  // if there are fewer, chunks are halved before trades
constexpr Patience kPatience{64, 1};
constexpr int64_t kMillion = 1'000'000;
constexpr int64_t kLeastGain = 500;  // the slowest rank must gain its time divided by this
constexpr int64_t kPrice = 30;       // of a tile over the cap, in rows of an average tile

Layout layout_of(const DispatchProblem& problem, const Dispatch& dispatch) {
  const int64_t rows = problem.num_local_tokens * problem.cp_size;
  return {rows, dispatch.chunk_size, problem.cp_size, dispatch.chunk_ranks};
}

// Slowest over mean, in millionths.
int64_t imbalance_ppm(std::span<const int64_t> times) {
  const __int128 sum = std::reduce(times.begin(), times.end(), int64_t{0});
  if (sum == 0) return kMillion;
  const __int128 most = std::ranges::max(times);
  return static_cast<int64_t>(most * static_cast<int64_t>(times.size()) * kMillion / sum);
}

bool can_halve(const DispatchProblem& problem, int64_t chunk_size) {
  const int64_t half = chunk_size / 2;
  const bool tiled = half % problem.tile_q == 0 || chunk_size % problem.tile_q != 0;
  return !problem.chunk_size && chunk_size % 2 == 0 && tiled && half >= problem.tile_q &&
         problem.num_local_tokens / half <= kMaxChunksPerRank;
}

void halve(Dispatch& dispatch) {
  std::vector<int32_t> finer;
  finer.reserve(2 * dispatch.chunk_ranks.size());
  for (const int32_t rank : dispatch.chunk_ranks) finer.insert(finer.end(), 2, rank);
  dispatch.chunk_ranks = std::move(finer);
  dispatch.chunk_size /= 2;
}

// A layout with the rows that its ranks receive.
struct Candidate {
  Dispatch dispatch;
  int64_t rows = 0;  // of all ranks together
};

// What one chunk size needs for trades.
struct Trading {
  std::vector<int64_t> chunk_loads;  // tiles
  Segments segments;
};

Trading trading_for(const DispatchProblem& problem, const Dispatch& dispatch) {
  const auto num_chunks = static_cast<int64_t>(dispatch.chunk_ranks.size());
  const int64_t size = dispatch.chunk_size;
  const std::vector<int64_t> tiles =
      tile_loads(problem.slices, size, num_chunks, problem.tile_q, problem.tile_k);
  return {sum_groups(tiles, ceil_div(size, problem.tile_q)),
          make_segments(keys_by_block(problem.slices, size, num_chunks), size)};
}

// Trades that bring every rank's share of the time under the cap, which is in the middle between
// equal times and what is allowed.
Candidate traded(const DispatchProblem& problem, const Trading& trading, const Dispatch& from) {
  const auto& loads = trading.chunk_loads;
  const int64_t total = std::reduce(loads.begin(), loads.end(), int64_t{0});
  const int64_t mean = total / problem.cp_size;
  std::vector<int64_t> extra = shares(from.times, total);
  const std::vector<int64_t> tiles = rank_loads(loads, from.chunk_ranks, problem.cp_size);
  for (size_t rank = 0; rank < extra.size(); ++rank) extra[rank] -= tiles[rank];
  const int64_t slack = (problem.max_imbalance_ppm - kMillion) / 2;
  const LoadLimits limits{0, mean + mean / 1000 * slack / 1000};
  Assignment state(trading.segments, loads, problem.cp_size, limits, from.chunk_ranks);
  state.set_extra_loads(std::move(extra));
  Rng rng(0);
  const int64_t rows_of_tile = problem.num_local_tokens / std::max<int64_t>(1, mean) + 1;
  repair(state, kPrice * rows_of_tile, rng, kPatience);
  return {{from.chunk_size, state.ranks(), {}}, state.traffic().total()};
}

// Whether the slowest rank gains enough, and more than the rows cost that are received besides. An
// exchange hides behind a kernel in part, so half of its time counts.
bool is_better(const DispatchProblem& problem, const Candidate& now, const Candidate& before) {
  const int64_t slowest = std::ranges::max(before.dispatch.times);
  const int64_t gain = slowest - std::ranges::max(now.dispatch.times);
  const int64_t more_rows = (now.rows - before.rows) / problem.cp_size;
  return gain >= slowest / kLeastGain && gain >= more_rows * problem.row_time / 2;
}

int64_t rows_of(const DispatchProblem& problem, const Trading& trading, const Dispatch& dispatch) {
  Traffic traffic(trading.segments, problem.cp_size);
  traffic.assign(dispatch.chunk_ranks);
  return traffic.total();
}

}  // namespace

Dispatch balance_times(const DispatchProblem& problem, const RankClock& clock, Dispatch found) {
  if (!can_time(problem.slices, layout_of(problem, found))) return found;
  found.times = rank_times(problem.slices, layout_of(problem, found), clock);
  if (problem.swap_trials == 0 || problem.cp_size == 1) return found;
  if (imbalance_ppm(found.times) <= problem.max_imbalance_ppm) return found;
  const Dispatch coarse = found;
  while (can_halve(problem, found.chunk_size) &&
         problem.num_local_tokens / found.chunk_size < kChunksPerRank) {
    halve(found);
  }
  Trading trading = trading_for(problem, found);
  // Halving moves no row, so the rows are those of `coarse` too.
  Candidate best{coarse, rows_of(problem, trading, found)};
  const int64_t rounds = problem.cp_size > kFewRanks ? 1 : kMaxRounds;
  for (int64_t round = 0; round < rounds; ++round) {
    Candidate next = traded(problem, trading, found);
    const TimedChunks before{found.chunk_ranks, found.times};
    next.dispatch.times =
        rank_times(problem.slices, layout_of(problem, next.dispatch), clock, before);
    if (is_better(problem, next, best)) {
      best = next;
      found = std::move(next.dispatch);
      if (imbalance_ppm(found.times) <= problem.max_imbalance_ppm) break;
    } else if (can_halve(problem, found.chunk_size)) {
      halve(found);
      trading = trading_for(problem, found);
    } else {
      break;
    }
  }
  return best.dispatch;
}

}  // namespace magi
