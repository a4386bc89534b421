// How long a rank's kernels take: what the planner asks of the layer that knows the kernels.
#pragma once

#include <cstdint>
#include <span>

#include "planner/slices.h"

namespace magi {

class RankClock {
 public:
  virtual ~RankClock() = default;

  // The time of forward and backward together, in a unit of the clock's own. `slices` are those of
  // one rank: q = local row, k = row of the buffer of own and received keys. The result must be the
  // same on every machine.
  virtual int64_t time(std::span<const Slice> slices, int64_t num_q, int64_t num_k) const = 0;
};

}  // namespace magi
