#include "schedule/backward_choice.h"

#include "schedule/backward_bands.h"
#include "schedule/backward_turns.h"

namespace magi {
namespace {

// In deterministic mode blocks of a single kv head, all in one queue, took up to a third more time
// than the simulation says (docs/history/kernel_backward.md, deterministic mode at step 10).
constexpr int64_t kFewestLanes = 2;

}  // namespace

BwdChoice choose_bwd(std::span<const Slice> slices, const BwdLengths& lengths,
                     const FwdHeads& heads, int64_t num_sms, const BwdTiling& tiling,
                     const BwdMode& mode) {
  BwdChoice choice;
  choice.work = build_bwd_work_list(slices, lengths, tiling, mode.deterministic);
  const int64_t head_bytes = lengths.num_q * heads.head_dim * 8;  // Q, dO in 16 bits, dQ in 32
  const BwdRules rules{mode.deterministic ? kFewestLanes : 0,
                       mode.may_take_turns && !mode.deterministic};
  choice.schedule = choose_bwd_schedule(choice.work, heads.heads_q / heads.heads_kv, heads.heads_kv,
                                        num_sms, head_bytes, lengths.num_q, rules);
  if (mode.deterministic)
    number_turns(choice.work);
  else if (choice.schedule.band_rows > 0)
    cut_into_bands(choice.work, choice.schedule.band_rows, tiling.tile_q);
  return choice;
}

}  // namespace magi
