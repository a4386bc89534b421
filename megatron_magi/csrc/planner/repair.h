// Brings every rank under the cap again, at little cost in rows.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "planner/assignment.h"
#include "planner/rng.h"

namespace magi {

// Trades until no rank is above its cap; each step takes the best of a few trades that lower the
// overload of one of the fullest ranks, by rows plus `price` per tile. Where there is none, two
// trades at once may do it, or one of the emptiest ranks gets heavier chunks first, so that its
// room spreads to other ranks. Returns whether it succeeded; limits must have no floor.
bool repair(Assignment& state, int64_t price, Rng& rng);

// The same where rows do not matter: `ranks` with no rank above `cap`, or as given where that was
// not reached.
std::vector<int32_t> balance(std::span<const int64_t> chunk_loads, int64_t cp_size, int64_t cap,
                             std::vector<int32_t> ranks);

}  // namespace magi
