// Broadcasts from lane 0 of a warp. A lane that arrives at a barrier for its warp must be the one
// that has read what others wrote with ordinary stores, so that its arrival covers every read.
#pragma once
#include "ptx.h"

namespace magi {

MAGI_DEVICE int from_lane0(int x) {
  return __shfl_sync(0xffffffff, x, 0);
}
MAGI_DEVICE int4 from_lane0(const int4& x) {
  return {from_lane0(x.x), from_lane0(x.y), from_lane0(x.z), from_lane0(x.w)};
}

}  // namespace magi
