// Brings every rank's load below the cap, at little cost in transferred rows.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "planner/assignment.h"
#include "planner/rng.h"

namespace magi {

// Trades until no rank is above its cap. Each step takes the best of a few trades that lower the
// overload of one of the fullest ranks; a trade is judged by rows plus `price` per tile. If there
// is none, two trades at once may help, or one of the emptiest ranks gets heavier chunks first, so
// that other ranks gain room. Returns whether it succeeded; limits must have no floor.
bool repair(Assignment& state, int64_t price, Rng& rng);

// The same without regard to rows: `ranks` changed so that no rank is above `cap`, or as given if
// that was not reached.
std::vector<int32_t> balance(std::span<const int64_t> chunk_loads, int64_t cp_size, int64_t cap,
                             std::vector<int32_t> ranks);

}  // namespace magi
