#include "planner/stages.h"

#include <algorithm>

namespace magi {
namespace {

// A further stage of the backward costs so many percent of the rank's whole backward: its last
// blocks leave processors idle, and kernels side by side share less in the cache. On one H200, 2K
// to 8K tokens a rank, a second stage took -4 to 25 % more, 6 % in the median
// (benchmarks/records/rank_times_stages_h200_2026-11-29.json); exchange_ps and call_ps are a part.
constexpr int64_t kStagePercent = 3;

// The time of one of `parts` equal exchanges of the rows that the rank receives.
TimePs exchange_ps(const RankWork& work, const StageCosts& costs, int64_t row_ps, int64_t parts) {
  return work.remote_rows == 0 ? 0 : TimePs{work.remote_rows} * row_ps / parts + costs.exchange_ps;
}

// Times of one stage of a forward.
struct StageWork {
  TimePs receive = 0;  // its rows
  TimePs fixed = 0;    // one more kernel call, passes over out
  TimePs attend = 0;
};

std::vector<StageWork> stage_work(const RankWork& work, const StageCosts& costs,
                                  const Staging& staging) {
  const TimePs own = TimePs{work.own_tiles} * costs.tile_ps;
  const TimePs remote = TimePs{work.remote_tiles} * costs.tile_ps;
  const TimePs everything = exchange_ps(work, costs, costs.row_ps, 1);
  if (staging.forward == Forward::kLocalFirst) {
    const TimePs local = TimePs{work.local_tiles} * costs.tile_ps;
    return {{0, 0, local}, {everything, costs.call_ps, own + remote - local}};
  }
  const int64_t degree = staging.degree;
  if (staging.forward == Forward::kAtOnce || degree == 0) return {{everything, 0, own + remote}};
  const StageWork part{exchange_ps(work, costs, costs.row_ps, degree),
                       TimePs{costs.call_ps} + costs.pass_ps, remote / degree};
  std::vector<StageWork> stages(degree + 1, part);
  stages[0] = {0, costs.pass_ps, own};
  return stages;
}

TimePs forward_ps(const RankWork& work, const StageCosts& costs, const Staging& staging) {
  return forward_stages(work, costs, staging).back().compute_end;
}

TimePs backward_ps(const RankWork& work, const StageCosts& costs, int64_t degree) {
  const TimePs own = TimePs{work.own_tiles} * costs.tile_ps / 2 * 5;
  const TimePs remote = TimePs{work.remote_tiles} * costs.tile_ps / 2 * 5;
  const int64_t parts = std::max<int64_t>(degree, 1);
  const TimePs receive =
      costs.keeps_rows ? TimePs{0} : exchange_ps(work, costs, costs.row_ps, parts);
  const TimePs grads = exchange_ps(work, costs, costs.grad_row_ps, parts);
  const TimePs first = std::max<TimePs>(receive, costs.pass_ps);
  if (degree == 0) return first + own + remote + grads;
  // Each call also launches kernels before and after the main one.
  TimePs time = first + TimePs{4 * degree} * costs.call_ps;
  time += (degree - 1) * ((own + remote) * kStagePercent / 100);
  for (int64_t stage = 1; stage <= degree; ++stage) {
    const TimePs travelling =
        (stage < degree ? receive : TimePs{0}) + (stage > 1 ? grads : TimePs{0});
    time += std::max(remote / degree, travelling);
  }
  return time + std::max(own, grads);
}

template <class OneRank>
TimePs slowest(std::span<const RankWork> work, const OneRank& one_rank) {
  TimePs most = 0;
  for (const RankWork& rank : work) most = std::max(most, one_rank(rank));
  return most;
}

// Ends of the stages as row counts along the whole list, ascending; the last one is the total.
std::vector<int64_t> stage_ends(std::span<const Transfer> transfers, int64_t degree,
                                int64_t granule) {
  int64_t total = 0;
  for (const Transfer& t : transfers) total += t.rows.size();
  const int64_t slack = total / (8 * degree);
  std::vector<int64_t> ends;
  size_t i = 0;
  int64_t start = 0;  // rows before transfers[i]
  for (int64_t stage = 1; stage < degree; ++stage) {
    const int64_t ideal = total * stage / degree;
    while (i < transfers.size() && start + transfers[i].rows.size() <= ideal) {
      start += transfers[i++].rows.size();
    }
    const int64_t end = i < transfers.size() ? start + transfers[i].rows.size() : total;
    int64_t cut = start + (ideal - start + granule / 2) / granule * granule;
    if (ideal - start <= slack) cut = start;
    if (end - ideal <= slack && end - ideal < ideal - start) cut = end;
    cut = std::min(cut, end);
    ends.push_back(ends.empty() ? cut : std::max(cut, ends.back()));
  }
  ends.push_back(total);
  return ends;
}

}  // namespace

std::vector<StageTime> forward_stages(const RankWork& work, const StageCosts& costs,
                                      const Staging& staging) {
  const std::vector<StageWork> stages = stage_work(work, costs, staging);
  std::vector<StageTime> times;
  times.reserve(stages.size());
  TimePs may_receive = 0, done = 0;
  for (const StageWork& stage : stages) {
    StageTime time;
    time.receive_start = may_receive;
    time.receive_end = may_receive + stage.receive;
    time.compute_start = std::max(time.receive_end, done);
    may_receive = time.compute_start + stage.fixed;
    done = time.compute_end = may_receive + stage.attend;
    times.push_back(time);
  }
  return times;
}

TimePs forward_time_ps(std::span<const RankWork> work, const StageCosts& costs,
                       const Staging& staging) {
  return slowest(work, [&](const RankWork& rank) { return forward_ps(rank, costs, staging); });
}

TimePs backward_time_ps(std::span<const RankWork> work, const StageCosts& costs, int64_t degree) {
  return slowest(work, [&](const RankWork& rank) { return backward_ps(rank, costs, degree); });
}

Staging choose_staging(std::span<const RankWork> work, const StageCosts& costs,
                       std::optional<int64_t> degree, std::optional<Forward> forward) {
  Staging best{degree.value_or(0), forward.value_or(Forward::kAtOnce)};
  const auto time_of = [&](const Staging& s) {
    return forward_time_ps(work, costs, s) + backward_time_ps(work, costs, s.degree);
  };
  for (int64_t d = degree.value_or(0); d <= degree.value_or(kMaxAutoDegree); ++d) {
    for (const Forward f : {Forward::kAtOnce, Forward::kLocalFirst, Forward::kStaged}) {
      const Staging other{d, f};
      if (f == forward.value_or(f) && time_of(other) < time_of(best)) best = other;
    }
  }
  return best;
}

void split_stages(std::span<const Transfer> transfers, int64_t granule,
                  std::span<std::vector<Transfer>> stages) {
  // 1. Take sources in turn: those above the rank first, then those below.
  const auto above =
      std::ranges::find_if(transfers, [](const Transfer& t) { return t.src > t.dst; });
  std::vector<Transfer> turn(above, transfers.end());
  turn.insert(turn.end(), transfers.begin(), above);
  const int64_t degree = static_cast<int64_t>(stages.size());
  const std::vector<int64_t> ends = stage_ends(turn, degree, granule);
  // 2. Cut the list at the stages' ends.
  std::vector<Transfer> parts;
  parts.reserve(turn.size() + degree);
  int32_t stage = 1;
  int64_t done = 0;
  for (Transfer rest : turn) {
    while (!rest.rows.empty()) {
      while (stage < degree && done >= ends[stage - 1]) ++stage;
      Transfer part = rest;
      part.stage = stage;
      part.rows.end = std::min(rest.rows.end, rest.rows.start + ends[stage - 1] - done);
      done += part.rows.size();
      rest.rows.start = part.rows.end;
      parts.push_back(part);
    }
  }
  // 3. Order each stage by source again: those below the rank come first.
  for (const bool below : {true, false}) {
    for (const Transfer& part : parts) {
      if ((part.src < part.dst) == below) stages[part.stage - 1].push_back(part);
    }
  }
}

}  // namespace magi
