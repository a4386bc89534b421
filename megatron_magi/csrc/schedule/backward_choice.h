// The choice of a backward's work list and schedule.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "planner/slices.h"
#include "schedule/backward.h"
#include "schedule/backward_schedule.h"
#include "schedule/forward_choice.h"

namespace magi {

struct BwdMode {
  bool deterministic = false;
  bool may_take_turns = true;  // parts of a tile, in fast mode
};

struct BwdChoice {
  BwdWorkList work;
  BwdSchedule schedule;
};

// Throws std::invalid_argument like `build_bwd_work_list`.
BwdChoice choose_bwd(std::span<const Slice> slices, const BwdLengths& lengths,
                     const FwdHeads& heads, int64_t num_sms, const BwdTiling& tiling,
                     const BwdMode& mode);

}  // namespace magi
