#include "schedule/kernel_clock.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "attention/widths.h"
#include "schedule/backward.h"
#include "schedule/makespan.h"

namespace magi {
namespace {

// Fitted to the forward and backward of 82 rank views on an H200 (64 query and 8 key heads of 128,
// 4k to 16k tokens a rank): the ratio of two ranks' times is predicted within 1.5 % (root mean
// square).
constexpr double kBackwardStep = 1.39;  // 64 queries x 128 keys, over a forward step
constexpr double kBlockOverhead = 3.;   // steps of the backward: start, keys, gradients
constexpr double kSplitOverhead = 3.;   // partial sums of a block, written and read again
constexpr double kRowOverhead = 1.;     // of 64 query rows: delta, clearing and casting dq
constexpr int64_t kMaxSplits = 2;       // more do not change which rank is slower

int64_t compiled_dim(int64_t head_dim) {
  for (const HeadWidths& compiled : kCompiledWidths)
    if (head_dim <= compiled.head_dim) return compiled.head_dim;
  return std::end(kCompiledWidths)[-1].head_dim;
}

// About half of the kv heads at a time, as the schedules that are chosen mostly have.
int64_t heads_at_a_time(int64_t num_heads_kv) {
  for (int64_t heads = num_heads_kv / 2; heads > 1; --heads)
    if (num_heads_kv % heads == 0) return heads;
  return 1;
}

// What a backward's blocks are simulated with.
struct Blocks {
  int64_t group = 1;      // query heads of a kv head
  int64_t sections = 1;   // of kv heads, one after another
  int64_t at_a_time = 1;  // kv heads of a section
  int64_t num_sms = 1;
};

double block_overhead(int64_t splits) {
  return kBlockOverhead + (splits > 1 ? kSplitOverhead : 0.);
}

// No launch ends before its work is shared equally.
double least_end(const BwdWorkList& list, const Blocks& blocks, int64_t splits) {
  const double num_blocks = static_cast<double>(static_cast<int64_t>(list.items.size()) * splits);
  const double total =
      static_cast<double>(list.steps * blocks.group) + block_overhead(splits) * num_blocks;
  return total * static_cast<double>(blocks.sections * blocks.at_a_time) /
         static_cast<double>(blocks.num_sms);
}

// The end of the last block. All costs are multiples of a half, so that sums are exact. Equal
// blocks come `at_a_time` together; if that has a divisor in common with the number of processors,
// so many processors are always free at the same time and stand for one.
double last_end(const BwdWorkList& list, const Blocks& blocks, int64_t splits) {
  const int64_t alike = std::gcd(blocks.at_a_time, blocks.num_sms);
  Makespan launch(blocks.num_sms / alike);
  for (int64_t section = 0; section < blocks.sections; ++section)
    for (const BwdItem& item : list.items)
      launch.add(static_cast<double>(item.steps * (blocks.group / splits)) + block_overhead(splits),
                 blocks.at_a_time / alike * splits);
  return launch.last();
}

// Forward steps that take as long as a step of the backward.
double backward_step_time(int64_t head_dim) {
  const int64_t tile_k = bwd_tile_k(static_cast<int>(head_dim));
  return kBackwardStep * static_cast<double>(head_dim * tile_k) / (128. * 128.);
}

// Backward steps that take as long as what a launch does with its query rows before and after the
// blocks.
double row_steps(int64_t num_q, int64_t heads_q) {
  return kRowOverhead * static_cast<double>(num_q * heads_q) / static_cast<double>(kBwdTileQ * 64);
}

}  // namespace

KernelClock::KernelClock(const FwdHeads& heads, int64_t num_sms)
    : heads_{heads.heads_q, heads.heads_kv, compiled_dim(heads.head_dim)}, num_sms_(num_sms) {}

double KernelClock::forward_steps(std::span<const Slice> slices, int64_t num_q,
                                  int64_t num_k) const {
  return fwd_cost(slices, num_q, num_k, heads_, fwd_variants(heads_).front(), num_sms_);
}

double KernelClock::backward_steps(std::span<const Slice> slices, int64_t num_q,
                                   int64_t num_k) const {
  BwdTiling tiling;
  tiling.tile_k = bwd_tile_k(static_cast<int>(heads_.head_dim));
  const BwdWorkList list = build_bwd_work_list(slices, {num_q, num_k}, tiling, false);
  const int64_t at_a_time = heads_at_a_time(heads_.heads_kv);
  const Blocks blocks{heads_.heads_q / heads_.heads_kv, heads_.heads_kv / at_a_time, at_a_time,
                      num_sms_};
  double steps = last_end(list, blocks, 1);
  for (int64_t splits = 2; splits <= kMaxSplits && blocks.group % splits == 0; splits *= 2)
    if (least_end(list, blocks, splits) < steps)
      steps = std::min(steps, last_end(list, blocks, splits));
  return steps + row_steps(num_q, heads_.heads_q);
}

int64_t KernelClock::time(std::span<const Slice> slices, int64_t num_q, int64_t num_k) const {
  const double steps = forward_steps(slices, num_q, num_k) +
                       backward_step_time(heads_.head_dim) * backward_steps(slices, num_q, num_k);
  return std::llround(1000. * steps);
}

}  // namespace magi
