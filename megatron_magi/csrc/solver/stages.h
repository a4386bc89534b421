// When rows travel: the number of remote stages and which rows each of them brings.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "solver/needs.h"

namespace magi {

// Times in picoseconds, so that the choice is made in integers and is the same everywhere.
struct StageCosts {
  int64_t row_ps = 0;    // to receive one row (key and value of one token)
  int64_t tile_ps = 0;   // to attend one tile
  int64_t stage_ps = 0;  // fixed cost of one more stage
};

// What one rank has to do.
struct RankWork {
  int64_t own_tiles = 0;     // on its own keys
  int64_t remote_tiles = 0;  // on received keys
  int64_t remote_rows = 0;   // to receive
};

inline constexpr int64_t kMaxAutoDegree = 4;

// Modelled time of the slowest rank: receive, then attend everything (degree 0), or attend own keys
// while stage 1 arrives, then stage i while stage i + 1 arrives, stages of equal size.
int64_t stage_time_ps(std::span<const RankWork> work, const StageCosts& costs, int64_t degree);

// The degree in 0..kMaxAutoDegree with the least `stage_time_ps`; the lower one of equals.
int64_t choose_degree(std::span<const RankWork> work, const StageCosts& costs);

// Splits one rank's transfers, ordered by (src, row), into stages 1..degree of nearly equal rows
// and appends them to `stages[stage - 1]`, in that order again. Peers come in turn beginning at
// rank + 1, so that no two ranks pull from one peer at the same time. A stage ends between two
// ranges where one ends within 1/8 of the ideal place, else inside a range, at a multiple of
// `granule` rows from its start.
void split_stages(std::span<const Transfer> transfers, int64_t granule,
                  std::span<std::vector<Transfer>> stages);

}  // namespace magi
