// The time of a rank's kernels, predicted from the work lists that they would run.
#pragma once

#include <cstdint>
#include <span>

#include "planner/rank_clock.h"
#include "schedule/forward_choice.h"

namespace magi {

// Times are in thousandths of a forward step of 128 queries x 128 keys of head_dim 128 on one
// processor. Own and received keys are one launch in each direction, fast mode.
class KernelClock : public RankClock {
 public:
  // Any head_dim: heads are padded to the next one that kernels are compiled for.
  KernelClock(const FwdHeads& heads, int64_t num_sms);

  int64_t time(std::span<const Slice> slices, int64_t num_q, int64_t num_k) const override;

  double forward_steps(std::span<const Slice> slices, int64_t num_q, int64_t num_k) const;
  double backward_steps(std::span<const Slice> slices, int64_t num_q, int64_t num_k) const;

 private:
  FwdHeads heads_;
  int64_t num_sms_;
};

}  // namespace magi
