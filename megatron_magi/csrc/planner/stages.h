// When rows are transferred: the number of remote stages and the rows of each.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "planner/required_rows.h"

namespace magi {

using TimePs = __int128;  // no cost table makes it overflow

// Times in picoseconds, so that the choice is made in integers and is the same everywhere.
struct StageCosts {
  int64_t row_ps = 0;           // to receive one row (key and value of one token)
  int64_t grad_row_ps = 0;      // to receive the gradients of one row
  int64_t tile_ps = 0;          // to attend one tile forward; backward takes 5/2 of that
  int64_t exchange_ps = 0;      // fixed cost of an exchange
  int64_t call_ps = 0;          // fixed cost of one more kernel call
  int64_t pass_ps = 0;          // to read or write 8 bytes for every element of a rank's out
  int64_t crossing_row_ps = 0;  // to receive one row from another node
  bool keeps_rows = false;      // the backward reads the rows that the forward has received
};

// The work of one rank.
struct RankWork {
  int64_t own_tiles = 0;     // on its own keys
  int64_t remote_tiles = 0;  // on received keys
  int64_t local_tiles = 0;   // of rows that see own keys only
  int64_t remote_rows = 0;   // to receive; see rows_on_link in transfers.h
};

// How the forward uses the rows that it receives.
enum class Forward {
  kAtOnce = 0,      // everything is received, then one kernel call
  kLocalFirst = 1,  // rows that see own keys only while keys arrive, then the other rows
  kStaged = 2,      // own keys, then stage by stage, merged
};

struct Staging {
  int64_t degree = 0;  // remote stages
  Forward forward = Forward::kAtOnce;
};

inline constexpr int64_t kMaxAutoDegree = 4;

// One stage of a rank's forward on the modelled time line.
struct StageTime {
  TimePs receive_start = 0;
  TimePs receive_end = 0;
  TimePs compute_start = 0;
  TimePs compute_end = 0;
};

// The forward of one rank; it has at least one stage. A stage begins when its rows have arrived and
// the one before it has ended: first it takes its fixed cost, then it computes while the rows of
// the next stage arrive. A staged forward computes on own keys and then on remote stages of equal
// size. It keeps out in fp32, which takes one more pass to write and finally cast it, and one to
// merge each stage.
std::vector<StageTime> forward_stages(const RankWork& work, const StageCosts& costs,
                                      const Staging& staging);

// Modelled time of the slowest rank, forward: the end of its last stage.
TimePs forward_time_ps(std::span<const RankWork> work, const StageCosts& costs,
                       const Staging& staging);

// Modelled backward time of the slowest rank. The first rows arrive while sums are prepared (one
// pass), unless they were kept. Then come the remote stages, each of whose gradients are sent while
// the next stage computes, and own keys last. A stage beyond the first has a price of its own.
TimePs backward_time_ps(std::span<const RankWork> work, const StageCosts& costs, int64_t degree);

// The degree in 0..kMaxAutoDegree and the forward with the least modelled time, and the lower ones
// if times are equal. A given degree or forward is kept.
Staging choose_staging(std::span<const RankWork> work, const StageCosts& costs,
                       std::optional<int64_t> degree, std::optional<Forward> forward);

// Splits one rank's transfers, ordered by (src, row), into stages 1..degree of nearly equal rows
// and appends them to `stages[stage - 1]`, in the same order. Peers come in turn beginning at
// rank + 1, so that no two ranks receive from one peer at the same time. A stage ends between two
// ranges if one ends within 1/8 of the ideal place, otherwise inside a range, at a multiple of
// `granule` rows from its start.
void split_stages(std::span<const Transfer> transfers, int64_t granule,
                  std::span<std::vector<Transfer>> stages);

}  // namespace magi
