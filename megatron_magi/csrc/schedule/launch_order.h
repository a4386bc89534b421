// The order in which a launch over own and received keys starts its blocks.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/backward.h"
#include "schedule/backward_schedule.h"

namespace magi {

// Times on one processor, in steps of the backward.
struct BwdTravel {
  double arrival = 0.;  // from the first block's start until received keys lie there
  double departure =
      0.;  // that is left at the launch's end, if gradients of received keys leave then
};

struct BwdProcessors {
  int64_t num_sms = 1;
  int64_t group = 1;         // query heads of a kv head
  int64_t num_heads_kv = 1;  // in sections, see BwdSchedule
};

// Which item of which section starts next, as section * items + item. Empty: section by section in
// list order, as on one buffer: so without received keys, and if keys and gradients take no time.
//
// The end is predicted, of the launch and of the return of gradients, for the list's order with and
// without own items in the place of received ones as long as these have not arrived, and with more
// or fewer own items behind the last received one, so that the gradients leave while they run. The
// first order within 1 % of a launch on one buffer is taken, or the best.
std::vector<int32_t> launch_order(const BwdWorkList& list, const BwdSchedule& schedule,
                                  const BwdProcessors& processors, const BwdTravel& travel);

}  // namespace magi
