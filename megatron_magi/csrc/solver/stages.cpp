#include "solver/stages.h"

#include <algorithm>
#include <tuple>

namespace magi {
namespace {

int64_t one_rank_ps(const RankWork& work, const StageCosts& costs, int64_t degree) {
  const int64_t receive = work.remote_rows * costs.row_ps;
  const int64_t own = work.own_tiles * costs.tile_ps;
  const int64_t remote = work.remote_tiles * costs.tile_ps;
  if (degree == 0) return receive + own + remote;
  const int64_t one_receive = receive / degree;
  const int64_t one_remote = remote / degree;
  return std::max(one_receive, own) + (degree - 1) * std::max(one_receive, one_remote) +
         one_remote + degree * costs.stage_ps;
}

// Ends of the stages as row counts along the whole list, ascending; the last one is the total.
std::vector<int64_t> stage_ends(const std::vector<Transfer>& transfers, int64_t degree,
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

int64_t stage_time_ps(std::span<const RankWork> work, const StageCosts& costs, int64_t degree) {
  int64_t slowest = 0;
  for (const RankWork& rank : work) slowest = std::max(slowest, one_rank_ps(rank, costs, degree));
  return slowest;
}

int64_t choose_degree(std::span<const RankWork> work, const StageCosts& costs) {
  int64_t best = 0;
  for (int64_t degree = 1; degree <= kMaxAutoDegree; ++degree) {
    if (stage_time_ps(work, costs, degree) < stage_time_ps(work, costs, best)) best = degree;
  }
  return best;
}

std::vector<Transfer> split_stages(std::vector<Transfer> transfers, int64_t cp_size, int64_t degree,
                                   int64_t granule) {
  const auto turn = [=](const Transfer& t) { return (t.src - t.dst + cp_size) % cp_size; };
  std::ranges::stable_sort(transfers, {}, turn);
  const std::vector<int64_t> ends = stage_ends(transfers, degree, granule);

  std::vector<Transfer> staged;
  int32_t stage = 1;
  int64_t done = 0;
  for (Transfer rest : transfers) {
    while (!rest.rows.empty()) {
      while (stage < degree && done >= ends[stage - 1]) ++stage;
      Transfer part = rest;
      part.stage = stage;
      part.rows.end = std::min(rest.rows.end, rest.rows.start + ends[stage - 1] - done);
      done += part.rows.size();
      rest.rows.start = part.rows.end;
      staged.push_back(part);
    }
  }
  std::ranges::sort(staged, {},
                    [](const Transfer& t) { return std::tuple(t.stage, t.src, t.rows.start); });
  return staged;
}

}  // namespace magi
