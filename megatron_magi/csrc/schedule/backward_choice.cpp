#include "schedule/backward_choice.h"

#include "schedule/backward_bands.h"
#include "schedule/backward_turns.h"

namespace magi {
BwdShape bwd_shape(const BwdLengths& lengths, const LaunchHeads& heads, int64_t num_sms) {
  BwdShape shape;
  shape.group = heads.heads_q / heads.heads_kv;
  shape.num_heads_kv = heads.heads_kv;
  shape.num_sms = num_sms;
  shape.head_bytes = lengths.num_q * heads.head_dim * 8;  // Q, dO in 16 bits, dQ in 32
  shape.num_q = lengths.num_q;
  return shape;
}

BwdChoice choose_bwd(std::span<const Slice> slices, const BwdLengths& lengths,
                     const LaunchHeads& heads, int64_t num_sms, const BwdTiling& tiling,
                     const BwdMode& mode) {
  BwdChoice choice;
  choice.work = build_bwd_work_list(slices, lengths, tiling, mode.deterministic);
  choice.schedule = choose_bwd_schedule(choice.work, bwd_shape(lengths, heads, num_sms), mode);
  if (mode.deterministic)
    number_turns(choice.work);
  else if (choice.schedule.band_rows > 0)
    cut_into_bands(choice.work, choice.schedule.band_rows, tiling.tile_q);
  return choice;
}

}  // namespace magi
