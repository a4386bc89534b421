#include "planner/assignment.h"

#include <algorithm>
#include <utility>

#include "planner/dispatch.h"

namespace magi {

Assignment::Assignment(const Segments& segments, std::span<const int64_t> chunk_loads,
                       int64_t cp_size, LoadLimits limits, std::vector<int32_t> ranks)
    : chunk_loads_(chunk_loads),
      limits_(limits),
      chunks_per_rank_(static_cast<int64_t>(ranks.size()) / cp_size),
      loads_(cp_size),
      traffic_(segments, cp_size) {
  assign(std::move(ranks));
}

void Assignment::assign(std::vector<int32_t> ranks) {
  ranks_ = std::move(ranks);
  loads_ = rank_loads(chunk_loads_, ranks_, cp_size());
  members_.resize(ranks_.size());
  place_.resize(ranks_.size());
  std::vector<int32_t> next(cp_size());
  for (int32_t rank = 0; rank < cp_size(); ++rank) {
    next[rank] = static_cast<int32_t>(rank * chunks_per_rank());
  }
  for (int32_t chunk = 0; chunk < num_chunks(); ++chunk) {
    place_[chunk] = next[ranks_[chunk]]++;
    members_[place_[chunk]] = chunk;
  }
  traffic_.assign(ranks_);
  set_limits(limits_);
}

void Assignment::set_limits(LoadLimits limits) {
  limits_ = limits;
  misfit_ = 0;
  for (const int64_t load : loads_) misfit_ += misfit_of(load);
}

int64_t Assignment::misfit_of(int64_t load) const {
  return std::max<int64_t>({0, load - limits_.cap, limits_.floor - load});
}

int64_t Assignment::misfit_delta(int32_t a, int32_t b) const {
  const int64_t load_a = loads_[ranks_[a]], load_b = loads_[ranks_[b]];
  const int64_t moved = chunk_loads_[a] - chunk_loads_[b];
  return misfit_of(load_a - moved) + misfit_of(load_b + moved) - misfit_of(load_a) -
         misfit_of(load_b);
}

void Assignment::swap(int32_t a, int32_t b, int64_t traffic_delta) {
  traffic_.swap(a, ranks_[a], b, ranks_[b], traffic_delta);
  misfit_ += misfit_delta(a, b);
  const int64_t moved = chunk_loads_[a] - chunk_loads_[b];
  loads_[ranks_[a]] -= moved;
  loads_[ranks_[b]] += moved;
  std::swap(ranks_[a], ranks_[b]);
  std::swap(place_[a], place_[b]);
  members_[place_[a]] = a;
  members_[place_[b]] = b;
}

}  // namespace magi
