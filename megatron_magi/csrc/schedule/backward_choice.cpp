#include "schedule/backward_choice.h"

#include <algorithm>
#include <cmath>

#include "schedule/backward_bands.h"
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

// In deterministic mode blocks of a single kv head, all in one queue, took up to a third more time
// than the simulation says (docs/history/kernel_backward.md, deterministic mode at step 10).
constexpr int64_t kFewestLanes = 2;
// All sections have one order then, so each must keep the processors busy for long enough that own
// items can run while received keys and gradients travel.
constexpr double kTravelBlocksPerSm = 1.9;

int64_t fewest_lanes(const BwdWorkList& list, const BwdTravel& travel, int64_t num_sms) {
  if (travel.arrival <= 0. && travel.departure <= 0.) return kFewestLanes;
  const double items = static_cast<double>(std::max<size_t>(list.items.size(), 1));
  const double blocks = kTravelBlocksPerSm * static_cast<double>(num_sms);
  return std::max(kFewestLanes, static_cast<int64_t>(std::ceil(blocks / items)));
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
  const BwdTravel travel = in_steps(mode.travel, lengths, heads, num_sms);
  // Gradients of received keys return while the launch goes on, so their parts come together.
  const bool may_take_turns =
      mode.may_take_turns && !mode.deterministic && travel.arrival <= 0. && travel.departure <= 0.;
  const int64_t lanes = mode.deterministic ? fewest_lanes(choice.work, travel, num_sms) : 0;
  choice.schedule = choose_bwd_schedule(choice.work, processors.group, heads.heads_kv, num_sms,
                                        head_bytes, lengths.num_q, {lanes, may_take_turns});
  if (mode.deterministic) {
    // The first section, alone.
    processors.num_heads_kv = choice.schedule.lanes_per_section / choice.schedule.num_splits;
    reorder(choice.work, launch_order(choice.work, choice.schedule, processors, travel));
    number_turns(choice.work);
  } else {
    choice.order = launch_order(choice.work, choice.schedule, processors, travel);
    if (choice.schedule.band_rows > 0)
      cut_into_bands(choice.work, choice.schedule.band_rows, tiling.tile_q);
  }
  return choice;
}

}  // namespace magi
