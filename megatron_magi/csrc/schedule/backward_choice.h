// The choice of a backward's work list, and of the order in which its blocks start.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "planner/slices.h"
#include "schedule/backward.h"
#include "schedule/backward_schedule.h"
#include "schedule/forward_choice.h"

namespace magi {

// How long received keys and their gradients travel: what all processors do meanwhile, in forward
// steps of 128 queries x 128 keys of head_dim 128. Keys set out when the launch is given to the
// GPU.
struct Travel {
  double keys = 0.;
  double gradients = 0.;
};

struct BwdMode {
  bool deterministic = false;
  Travel travel{};
  bool may_take_turns = true;  // parts of a tile, in fast mode, if nothing travels
};

struct BwdChoice {
  BwdWorkList work;
  BwdSchedule schedule;
  std::vector<int32_t> order;  // see launch_order.h
};

// List and schedule are those of all keys in one buffer, but no tile holds own and received keys.
// In deterministic mode items of all sections have the same order, that of the list. Throws
// std::invalid_argument like `build_bwd_work_list`.
BwdChoice choose_bwd(std::span<const Slice> slices, const BwdLengths& lengths,
                     const FwdHeads& heads, int64_t num_sms, const BwdTiling& tiling,
                     const BwdMode& mode);

}  // namespace magi
