#include "schedule/backward_choice.h"

#include <algorithm>

#include "schedule/backward_turns.h"
#include "schedule/kernel_clock.h"
#include "schedule/launch_order.h"

namespace magi {
namespace {

// On one processor, without what the launch does before its blocks and after them.
BwdTravel in_steps(const Travel& travel, const BwdLengths& lengths, const FwdHeads& heads,
                   int64_t num_sms) {
  const double step = backward_step_time(heads.head_dim) * static_cast<double>(num_sms);
  const double rows = row_steps(lengths.num_q, heads.heads_q) / 2.;
  return {std::max(0., travel.keys / step - rows), std::max(0., travel.gradients / step - rows)};
}

// Puts the items into an order of one section.
void reorder(BwdWorkList& list, const std::vector<int32_t>& order) {
  if (order.empty()) return;
  std::vector<BwdItem> items;
  for (const int32_t i : order) items.push_back(list.items[i]);
  list.items = std::move(items);
}

}  // namespace

BwdChoice choose_bwd(std::span<const Slice> slices, const BwdLengths& lengths,
                     const FwdHeads& heads, int64_t num_sms, const BwdTiling& tiling,
                     const BwdMode& mode) {
  BwdChoice choice;
  choice.work = build_bwd_work_list(slices, lengths, tiling, mode.deterministic);
  const int64_t head_bytes = lengths.num_q * heads.head_dim * 8;  // Q, dO in 16 bits, dQ in 32
  BwdProcessors processors{num_sms, heads.heads_q / heads.heads_kv, heads.heads_kv};
  choice.schedule = choose_bwd_schedule(choice.work, processors.group, heads.heads_kv, num_sms,
                                        head_bytes, lengths.num_q, mode.deterministic);
  const BwdTravel travel = in_steps(mode.travel, lengths, heads, num_sms);
  if (mode.deterministic) {
    processors.num_heads_kv = choice.schedule.heads_per_section;  // the first section, alone
    reorder(choice.work, launch_order(choice.work, choice.schedule, processors, travel));
    number_turns(choice.work);
  } else {
    choice.order = launch_order(choice.work, choice.schedule, processors, travel);
  }
  return choice;
}

}  // namespace magi
