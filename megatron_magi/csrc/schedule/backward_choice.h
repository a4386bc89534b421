// The choice of a backward's work list and schedule.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "planner/slices.h"
#include "schedule/backward.h"
#include "schedule/backward_schedule.h"
#include "schedule/launch_heads.h"

namespace magi {

struct BwdChoice {
  BwdWorkList work;
  BwdSchedule schedule;
};

// What a launch of these lengths and heads is chosen for.
BwdShape bwd_shape(const BwdLengths& lengths, const LaunchHeads& heads, int64_t num_sms);

// Throws std::invalid_argument like `build_bwd_work_list`.
BwdChoice choose_bwd(std::span<const Slice> slices, const BwdLengths& lengths,
                     const LaunchHeads& heads, int64_t num_sms, const BwdTiling& tiling,
                     const BwdMode& mode);

}  // namespace magi
