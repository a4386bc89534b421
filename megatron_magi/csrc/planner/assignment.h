// The state of the search: the rank of every chunk, the ranks' loads, and the rows to transfer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "planner/traffic.h"

namespace magi {

// Limits that a rank's load should stay between, in tiles.
struct LoadLimits {
  int64_t floor = 0;
  int64_t cap = 0;
};

class Assignment {
 public:
  // `segments` and `chunk_loads` must outlive the object.
  Assignment(const Segments& segments, std::span<const int64_t> chunk_loads, int64_t cp_size,
             LoadLimits limits, std::vector<int32_t> ranks);

  int64_t num_chunks() const { return static_cast<int64_t>(ranks_.size()); }
  int64_t cp_size() const { return static_cast<int64_t>(loads_.size()); }
  int64_t chunks_per_rank() const { return chunks_per_rank_; }
  const std::vector<int32_t>& ranks() const { return ranks_; }
  int32_t rank(int32_t chunk) const { return ranks_[chunk]; }
  int64_t load(int32_t rank) const { return loads_[rank]; }
  int64_t chunk_load(int32_t chunk) const { return chunk_loads_[chunk]; }
  const LoadLimits& limits() const { return limits_; }

  // The i-th chunk of a rank; the order is arbitrary and changes.
  int32_t member(int32_t rank, int64_t i) const { return members_[rank * chunks_per_rank_ + i]; }

  const Traffic& traffic() const { return traffic_; }
  // Number of tiles above the cap or below the floor, summed over all ranks.
  int64_t misfit() const { return misfit_; }

  // The change that a trade of chunks a and b, on different ranks, would make.
  int64_t misfit_delta(int32_t a, int32_t b) const;
  int64_t traffic_delta(int32_t a, int32_t b) const {
    return traffic_.swap_delta(a, ranks_[a], b, ranks_[b]);
  }
  void swap(int32_t a, int32_t b, int64_t traffic_delta);

  void set_limits(LoadLimits limits);
  void assign(std::vector<int32_t> ranks);  // restarts from another assignment

 private:
  int64_t misfit_of(int64_t load) const;

  std::span<const int64_t> chunk_loads_;
  LoadLimits limits_;
  int64_t chunks_per_rank_;
  std::vector<int32_t> ranks_;    // [num_chunks]
  std::vector<int64_t> loads_;    // [cp_size]
  std::vector<int32_t> members_;  // [cp_size * chunks_per_rank]
  std::vector<int32_t> place_;    // [num_chunks] index in members_
  Traffic traffic_;
  int64_t misfit_ = 0;
};

}  // namespace magi
