#include "solver/bwd_schedule.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>
#include <vector>

namespace magi {
namespace {

constexpr double kBlockOverhead = 3.;   // steps: start, keys, gradients
constexpr double kSplitOverhead = 1.5;  // steps: partial sums of a block, written and read again
constexpr double kTolerance = 1.005;
// Fitted to 21 masks and lengths with 10 schedules each on an H200: the choice reaches 98 % of the
// best of them on average (docs/kernel_notes_bwd.md).
constexpr double kHeadsPenalty = 0.02;  // for twice the kv heads at a time
constexpr double kDriftPenalty = 0.02;  // for twice the bytes that uneven items spread over
constexpr double kDriftBytes = 67e6;
constexpr double kCachePenalty = 0.1;  // grouped items of so many bytes lose each other's tiles
constexpr double kCacheBytes = 150e6;
// Blocks of different kv heads never wait for each other. Measured at 16k (129 items): one, two,
// four, eight heads together lose 25-40, 5-25, 0-9, 0-11 % against the fast mode.
constexpr int64_t kDeterministicBlocksPerSm = 3;
constexpr int64_t kMaxSplitBlocksPerSm = 32;  // with more blocks than this, splits do not pay

// Finishing time of the last block when blocks start in launch order on whatever is free.
double simulate(const BwdWorkList& list, int64_t group, int64_t num_heads_kv, int64_t num_sms,
                int64_t num_splits, int64_t heads_per_section) {
  std::priority_queue<double, std::vector<double>, std::greater<double>> free;
  for (int64_t i = 0; i < num_sms; ++i) free.push(0.);
  double last = 0.;
  const double overhead = kBlockOverhead + (num_splits > 1 ? kSplitOverhead : 0.);
  for (int64_t section = 0; section < num_heads_kv / heads_per_section; ++section) {
    for (const BwdItem& item : list.items) {
      const double cost = static_cast<double>(item.steps * (group / num_splits)) + overhead;
      for (int64_t i = 0; i < heads_per_section * num_splits; ++i) {
        const double end = free.top() + cost;
        free.pop();
        free.push(end);
        last = std::max(last, end);
      }
    }
  }
  return last;
}

// What the simulation does not see: blocks that run together but no longer share what they load.
double cache_factor(const BwdWorkList& list, int64_t group, int64_t head_bytes, int64_t num_q,
                    int64_t num_splits, int64_t heads_per_section) {
  const double heads = static_cast<double>(heads_per_section);
  double factor = 1. + kHeadsPenalty * std::log2(heads);
  if (list.grouped && heads * static_cast<double>(head_bytes) > kCacheBytes)
    factor += kCachePenalty;
  const double spread = list.shared_rows / static_cast<double>(std::max<int64_t>(num_q, 1)) *
                        static_cast<double>(head_bytes * (group / num_splits));
  return factor * (1. + kDriftPenalty * std::max(0., std::log2(spread / kDriftBytes)));
}

int64_t deterministic_heads(const BwdWorkList& list, int64_t num_heads_kv, int64_t num_sms) {
  const auto enough = [&](int64_t heads) {
    return heads * static_cast<int64_t>(list.items.size()) >= kDeterministicBlocksPerSm * num_sms;
  };
  int64_t heads = 1;
  while (heads < num_heads_kv && (num_heads_kv % heads != 0 || !enough(heads))) ++heads;
  return heads;
}

}  // namespace

BwdSchedule choose_bwd_schedule(const BwdWorkList& list, int64_t group, int64_t num_heads_kv,
                                int64_t num_sms, int64_t head_bytes, int64_t num_q,
                                bool deterministic) {
  std::vector<BwdSchedule> choices;
  for (int64_t splits = 1; splits <= group; splits *= 2) {
    if (group % splits != 0) break;
    if (splits > 1 && static_cast<int64_t>(list.items.size()) * num_heads_kv * splits / 2 >
                          kMaxSplitBlocksPerSm * num_sms)
      break;
    for (int64_t heads = 1; heads <= num_heads_kv; ++heads) {
      if (num_heads_kv % heads != 0) continue;
      const double makespan = simulate(list, group, num_heads_kv, num_sms, splits, heads) *
                              cache_factor(list, group, head_bytes, num_q, splits, heads);
      choices.push_back({splits, heads, makespan});
    }
  }
  double best = choices.front().makespan;
  for (const BwdSchedule& c : choices) best = std::min(best, c.makespan);
  BwdSchedule chosen = *std::find_if(choices.begin(), choices.end(), [&](const BwdSchedule& c) {
    return c.makespan <= best * kTolerance;
  });
  if (deterministic) chosen.heads_per_section = deterministic_heads(list, num_heads_kv, num_sms);
  return chosen;
}

}  // namespace magi
