#include "schedule/backward_schedule.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "schedule/backward_bands.h"
#include "schedule/backward_waits.h"
#include "schedule/makespan.h"

namespace magi {
namespace {

constexpr double kBlockOverhead = 3.;   // steps: start, keys, gradients
constexpr double kSplitOverhead = 1.5;  // steps: sums of a block, written and read again
constexpr double kTolerance = 1.005;
constexpr double kEvenly = 1.002;  // at most so far from equal shares is as good as equal
// A bound that is added up in another order may be off by it.
constexpr double kRounding = 1. - 1e-9;
// Fitted to 21 masks and lengths with 10 schedules each on an H200: the choice reached 98 % of the
// best of them on average (docs/history/kernel_backward.md, step 18).
constexpr double kHeadsPenalty = 0.02;  // for twice the kv heads at a time
constexpr double kDriftPenalty = 0.02;  // for twice the bytes over which uneven items spread
constexpr double kDriftBytes = 67e6;
constexpr double kLaneDriftBytes = 134e6;  // if lanes run one after another
// For twice the bytes over which processors of different speed drift apart in a launch of even
// items, if the cache does not hold all that a block walks (docs/history/kernel_backward.md, long
// rows).
constexpr double kSpeedPenalty = 0.016;
constexpr double kSpeedBytes = 10e6;
constexpr double kEvenPenalty = 0.05;  // for twice the bytes that even items go through, squared
constexpr double kEvenBytes = 67e6;
constexpr double kCachePenalty = 0.1;  // for grouped items that evict each other's tiles
constexpr double kCacheBytes = 150e6;
// More query heads at a time than this lose as much if items are grouped. Of 16 rank views with
// documents, each under 16 schedules on an H200, such schedules took up to 17 % more time than the
// simulation says.
constexpr double kGroupedHeads = 32.;
constexpr double kGroupedPenalty = 0.06;
// Scattered blocks: items of about one length start together and walk at one pace, as long as what
// they spread over fits the cache; the next ones start when these end, which is not at one time. So
// short blocks of one lane are best. Fitted to 20 schedules of random blocks of 128 at 16k and 64k
// tokens on an H200 (docs/history/kernel_backward.md, schedule).
constexpr double kScatteredPenalty = 0.055;  // for twice the bytes of spread, squared
constexpr double kScatteredBytes = 24e6;
constexpr double kScatteredLanesPenalty = 0.065;  // for twice the lanes, beyond kScatteredBytes
// Deterministic mode, where blocks of one lane (kv head and split) wait for each other and so go
// through the same rows together. Fitted to 50 sweeps of 6 to 12 schedules on an H200: the choice
// reached 99 % of the best of them on average (docs/kernel_notes_bwd.md, deterministic mode).
constexpr double kLanesPenalty = 0.005;  // for twice the lanes at a time
constexpr double kSplitsPenalty = 0.04;  // for twice the splits if heads are the outer loop
// Uneven items of a lane are at different rows and share less of what they load. They lose the more
// the more bytes a row has in all heads of a lane, and the more kv heads run at a time.
constexpr double kLaneRowPenalty = 0.02;
constexpr double kLaneRowBytes = 4096.;
// Rows of at least so many bytes a head (head_dim 256): the factor and the tolerance are as in fast
// mode, or wider, because lanes evict each other's rows. A step takes longer, so the lag is
// shorter.
constexpr double kWideRowBytes = 2048.;
constexpr double kWideTolerance = 1.015;
constexpr double kWideLag = 0.8;
// From a block's addition to the next block's in steps of head_dim 128: the addition is complete
// after about 0.4, the signal is on its way for 0.4 to 0.6, and is seen within 0.3 more.
constexpr double kLag = 1.3;
constexpr double kWidePenalties = 3.;             // times all of them, in fast mode at head_dim 256
constexpr int64_t kMaxSplitBlocksPerSm = 32;      // with more blocks than this, splits do not pay
constexpr int64_t kMaxScatteredBlocksPerSm = 64;  // nor of scattered blocks with more than this
// With more blocks than this, the last ones take less than 1 % of the time.
constexpr int64_t kMaxWholeBlocksPerSm = 64;
// Of a block on average, for each of those that it waits for. Beyond that, turns cost less than the
// pass over partial sums, up to 2 %.
constexpr int64_t kStepsForTurn = 64;
constexpr int64_t kMostSplitHeads = 2;  // kv heads at the end, if the others are whole

double block_overhead(int64_t num_splits) {
  return kBlockOverhead + (num_splits > 1 ? kSplitOverhead : 0.);
}

struct Candidate {
  int64_t splits = 1;
  int64_t heads = 1;      // kv heads at a time
  bool one_lane = false;  // but one split of a single one
  bool in_turns = false;  // and parts take turns
  int64_t whole = 0;      // kv heads before them that are not split
  int64_t band_rows = 0;  // of bands of an even list
  int64_t lanes() const { return one_lane ? 1 : splits * heads; }
  bool has_partial_sums() const { return splits > 1 && !in_turns; }
  // Of most blocks.
  int64_t common_splits() const { return whole > 0 ? 1 : splits; }
};

// Blocks that follow one another in a launch: sections of lanes.
struct Stretch {
  BwdLanes lanes;
  double overhead = 0.;  // of each block, in steps
  double bands = 1.;     // that an item is cut into

  double cost(const BwdItem& item) const {
    return static_cast<double>(item.steps * lanes.heads) / bands + overhead;
  }
};

std::vector<Stretch> stretches(const BwdWorkList& list, const Candidate& c, int64_t group,
                               int64_t num_heads_kv) {
  std::vector<Stretch> found;
  if (c.whole > 0) found.push_back({{1, group, c.whole}, block_overhead(1), 1.});
  const double rows = static_cast<double>(c.band_rows);
  const auto bands = c.band_rows > 0 ? static_cast<int64_t>(std::ceil(list.even_rows / rows)) : 1;
  const int64_t sections = (num_heads_kv - c.whole) * c.splits / c.lanes() * bands;
  found.push_back({{c.lanes(), group / c.splits, sections},
                   block_overhead(c.splits * bands),
                   static_cast<double>(bands)});
  return found;
}

// The sum of the steps of all blocks, over all processors.
double total_cost(const BwdWorkList& list, std::span<const Stretch> launch) {
  const double items = static_cast<double>(list.items.size());
  double total = 0.;
  for (const auto& [lanes, overhead, bands] : launch)
    total += static_cast<double>(lanes.count * lanes.sections) *
             (static_cast<double>(list.steps * lanes.heads) / bands + overhead * items);
  return total;
}

// No launch ends later: a block starts at the latest when what is before it would end if it were
// shared equally. Whatever an item has behind it, it has the most before it in the last section.
double most_makespan(const BwdWorkList& list, int64_t num_sms, const Stretch& last, double total) {
  const double sms = static_cast<double>(num_sms), count = static_cast<double>(last.lanes.count);
  double before = total, most = 0.;
  for (auto item = list.items.rbegin(); item != list.items.rend(); ++item) {
    const double cost = last.cost(*item);
    most = std::max(most, (before - cost) / sms + cost);
    before -= count * cost;
  }
  return most;
}

// The finishing time of the last block, if blocks start in launch order on the first free
// processor. Where the work is so much that no order could change it, it is not simulated.
double simulate(const BwdWorkList& list, int64_t num_sms, std::span<const Stretch> launch,
                double total) {
  const double even = total / static_cast<double>(num_sms);
  if (launch.size() == 1 && most_makespan(list, num_sms, launch.front(), total) <= even * kEvenly)
    return even;
  Makespan makespan(num_sms);
  for (const Stretch& part : launch)
    for (int64_t section = 0; section < part.lanes.sections; ++section)
      for (const BwdItem& item : list.items) makespan.add(part.cost(item), part.lanes.count);
  return makespan.last();
}

// No launch ends before its longest block, nor before its work is shared equally.
double least_makespan(const BwdWorkList& list, int64_t num_sms, std::span<const Stretch> launch,
                      double total) {
  BwdItem longest;
  for (const BwdItem& item : list.items) longest.steps = std::max(longest.steps, item.steps);
  double least = total / static_cast<double>(num_sms);
  for (const Stretch& part : launch) least = std::max(least, part.cost(longest) - part.overhead);
  return least;
}

double doublings(double value, double base) {
  return std::max(0., std::log2(value / base));
}

double row_bytes(int64_t head_bytes, int64_t num_q) {
  return static_cast<double>(head_bytes) / static_cast<double>(std::max<int64_t>(num_q, 1));
}

// What sharing_factor gives for scattered blocks.
double scattered_factor(const BwdWorkList& list, int64_t group, double row,
                        const Candidate& candidate) {
  const double lanes = static_cast<double>(candidate.lanes());
  const double bytes =
      list.scattered_rows * row * lanes * static_cast<double>(group / candidate.splits);
  const double beyond = doublings(bytes, kScatteredBytes);
  return 1. + kScatteredPenalty * beyond * beyond +
         kScatteredLanesPenalty * std::log2(lanes) * std::min(beyond, 1.);
}

// What a factor depends on besides the list and the candidate.
struct Sizes {
  int64_t group = 1;
  int64_t head_bytes = 0;
  int64_t num_q = 0;
  double steps = 0.;  // of a processor
};

// The part of the factor below for even items: the bytes that all lanes go through, and those over
// which processors of different speed drift apart, but within the rows of a block.
double even_factor(const BwdWorkList& list, const Sizes& sizes, double row,
                   const Candidate& candidate) {
  const double all_rows = list.even_rows;
  const double rows = candidate.band_rows > 0 ? static_cast<double>(candidate.band_rows) : all_rows;
  const double even = rows * row * static_cast<double>(candidate.lanes());
  const double of_block = rows * row * static_cast<double>(sizes.group / candidate.common_splits());
  const double drift =
      of_block > kBwdSharedBytes ? std::min(bwd_drift(sizes.steps, row), of_block) : 0.;
  return kEvenPenalty * std::pow(doublings(even, kEvenBytes), 2) +
         kSpeedPenalty * doublings(drift, kSpeedBytes);
}

// A factor for what the simulation ignores: blocks that run together may not share what they load.
double cache_factor(const BwdWorkList& list, const Sizes& sizes, const Candidate& candidate) {
  const double row = row_bytes(sizes.head_bytes, sizes.num_q);
  if (list.scattered_rows > 0.) return scattered_factor(list, sizes.group, row, candidate);
  const double heads = static_cast<double>(candidate.heads);
  const int64_t num_splits = candidate.common_splits();
  const double of_block = static_cast<double>(sizes.group / num_splits);
  // Each of the kv heads that run at a time spreads over as many bytes. If items are grouped, the
  // heads start together.
  const double drift = list.uneven_rows * row * of_block * (list.grouped ? 1. : heads);
  double factor = 1. + kHeadsPenalty * std::log2(heads);
  factor += even_factor(list, sizes, row, candidate);
  if (list.grouped && heads * static_cast<double>(sizes.head_bytes) > kCacheBytes)
    factor += kCachePenalty;
  if (list.grouped && heads * of_block > kGroupedHeads) factor += kGroupedPenalty;
  const double shared =
      candidate.common_splits() > 1 && candidate.one_lane ? kLaneDriftBytes : kDriftBytes;
  return factor * (1. + kDriftPenalty * doublings(drift, shared));
}

bool has_wide_rows(int64_t head_bytes, int64_t num_q) {
  return row_bytes(head_bytes, num_q) >= kWideRowBytes;
}

// The same for fast mode. Where tiles have 64 keys, a product moves twice the bytes, and what is
// not shared costs more.
double sharing_factor(const BwdWorkList& list, const Sizes& sizes, const Candidate& candidate) {
  const double factor = cache_factor(list, sizes, candidate);
  const bool is_wide = has_wide_rows(sizes.head_bytes, sizes.num_q);
  return is_wide ? 1. + kWidePenalties * (factor - 1.) : factor;
}

// The same for deterministic mode: lanes do not share what they load.
double lanes_factor(const BwdWorkList& list, const Sizes& sizes, const Candidate& candidate) {
  if (has_wide_rows(sizes.head_bytes, sizes.num_q)) return cache_factor(list, sizes, candidate);
  if (!list.heads_inner)
    return 1. + kSplitsPenalty * std::log2(static_cast<double>(candidate.splits));
  const double lanes = static_cast<double>(candidate.lanes());
  const double row = row_bytes(sizes.head_bytes, sizes.num_q);
  const double even = list.even_rows * row * lanes;
  const double share = list.uneven_rows / std::max(list.uneven_rows + list.even_rows, 1.);
  const double lane_row = row * static_cast<double>(sizes.group / candidate.splits);
  const double uneven = share * doublings(lane_row, kLaneRowBytes) *
                        std::log2(2. * static_cast<double>(candidate.heads));
  return (1. + kLanesPenalty * std::log2(lanes) +
          kEvenPenalty * std::pow(doublings(even, kEvenBytes), 2)) *
         (1. + kLaneRowPenalty * uneven);
}

// Whether the partial sums of this many splits stay small (1.1 GB at head_dim 128, of scattered
// blocks 2.2 GB).
bool may_split(const BwdWorkList& list, int64_t num_heads_kv, int64_t num_sms, int64_t splits) {
  const int64_t most = list.scattered_rows > 0. ? kMaxScatteredBlocksPerSm : kMaxSplitBlocksPerSm;
  return static_cast<int64_t>(list.items.size()) * num_heads_kv * splits / 2 <= most * num_sms;
}

// Items of one document that differ in length, or scattered ones: their blocks drift apart.
bool drifts(const BwdWorkList& list) {
  return !list.grouped && list.uneven_rows + list.scattered_rows > 0.;
}

// Kv heads and splits that can run at a time.
int64_t most_lanes(const BwdWorkList& list, int64_t group, int64_t num_heads_kv, int64_t num_sms) {
  int64_t splits = 1;
  while (group % (2 * splits) == 0 && may_split(list, num_heads_kv, num_sms, 2 * splits))
    splits *= 2;
  return splits * num_heads_kv;
}

// The candidates of deterministic mode, by lanes, and of fast mode without turns, by splits.
std::vector<Candidate> at_once(const BwdWorkList& list, int64_t group, int64_t num_heads_kv,
                               int64_t num_sms, int64_t fewest_lanes) {
  const int64_t least_lanes =
      std::min(fewest_lanes, most_lanes(list, group, num_heads_kv, num_sms));
  std::vector<Candidate> found;
  for (int64_t splits = 1; splits <= group && group % splits == 0; splits *= 2) {
    if (splits > 1 && !may_split(list, num_heads_kv, num_sms, splits)) break;
    if (splits > 1 && list.scattered_rows > 0. && fewest_lanes == 0)
      found.push_back({splits, 1, true});
    for (int64_t heads = 1; heads <= num_heads_kv; ++heads)
      if (num_heads_kv % heads == 0 && splits * heads >= least_lanes)
        found.push_back({splits, heads});
  }
  if (least_lanes > 0) std::ranges::stable_sort(found, {}, &Candidate::lanes);
  return found;
}

// Whether blocks of a tile that start together may wait for one another at their end.
bool have_time_for_turns(const BwdWorkList& list, int64_t group, int64_t splits) {
  const auto items = static_cast<int64_t>(list.items.size());
  return splits > 1 && list.steps * (group / splits) >= kStepsForTurn * (splits - 1) * items;
}

// Those in which parts of a tile take turns: one lane at a time of items that drift apart, the last
// kv head alone in splits, and bands of rows of long even items.
std::vector<Candidate> in_turns(const BwdWorkList& list, int64_t group, int64_t num_heads_kv,
                                int64_t num_sms, double row) {
  std::vector<Candidate> found;
  const auto blocks = static_cast<int64_t>(list.items.size()) * num_heads_kv;
  const bool has_end = list.scattered_rows == 0. && blocks <= kMaxWholeBlocksPerSm * num_sms;
  int64_t most = 1;
  for (int64_t splits = 2; splits <= group && group % splits == 0; splits *= 2) {
    if (drifts(list) || list.even_rows > 0.) found.push_back({splits, 1, true, true});
    for (int64_t split_heads = 1; has_end && split_heads <= kMostSplitHeads; ++split_heads)
      if (split_heads < num_heads_kv)
        found.push_back({splits, 1, true, true, num_heads_kv - split_heads});
    most = splits;
  }
  const bool is_even = list.uneven_rows + list.scattered_rows == 0.;
  const int64_t band_rows = is_even ? rows_of_band(list.even_rows, row) : 0;
  if (band_rows > 0) found.push_back({most, 1, true, true, 0, band_rows});
  return found;
}

std::vector<Candidate> candidates(const BwdWorkList& list, int64_t group, int64_t num_heads_kv,
                                  int64_t num_sms, double row, const BwdRules& rules) {
  std::vector<Candidate> found = at_once(list, group, num_heads_kv, num_sms, rules.fewest_lanes);
  if (!rules.may_take_turns) return found;
  for (Candidate& c : found) c.in_turns = have_time_for_turns(list, group, c.splits);
  if (list.grouped) return found;
  std::erase_if(found, [](const Candidate& c) { return c.one_lane; });
  const std::vector<Candidate> more = in_turns(list, group, num_heads_kv, num_sms, row);
  found.insert(found.end(), more.begin(), more.end());
  // Of equally good ones, those that need no partial sums.
  std::ranges::stable_partition(found, [](const Candidate& c) { return !c.has_partial_sums(); });
  return found;
}

}  // namespace

BwdSchedule choose_bwd_schedule(const BwdWorkList& list, int64_t group, int64_t num_heads_kv,
                                int64_t num_sms, int64_t head_bytes, int64_t num_q,
                                const BwdRules& rules) {
  // Items that share no rows hardly wait and are simulated as in fast mode.
  const bool deterministic = rules.fewest_lanes > 0;
  const bool is_wide = has_wide_rows(head_bytes, num_q);
  std::optional<BwdWaits> waits;
  if (deterministic && list.heads_inner) waits.emplace(list, is_wide ? kWideLag : kLag);
  const double tolerance = !deterministic ? kTolerance : is_wide ? kWideTolerance : 1.;
  const double row = row_bytes(head_bytes, num_q);
  std::vector<BwdSchedule> choices;
  double best = std::numeric_limits<double>::infinity();
  for (const Candidate& c : candidates(list, group, num_heads_kv, num_sms, row, rules)) {
    const std::vector<Stretch> launch = stretches(list, c, group, num_heads_kv);
    const double total = total_cost(list, launch);
    const Sizes sizes{group, head_bytes, num_q,
                      deterministic ? 0. : total / static_cast<double>(num_sms)};
    const double factor =
        deterministic ? lanes_factor(list, sizes, c) : sharing_factor(list, sizes, c);
    // Simulations take most of the time; one that cannot be near the best is left out.
    const double least = least_makespan(list, num_sms, launch, total);
    if (least * factor * kRounding > best * tolerance) continue;
    const Stretch& last = launch.back();
    const double end = waits ? waits->makespan(num_sms, last.lanes, last.overhead)
                             : simulate(list, num_sms, launch, total);
    choices.push_back({c.splits, c.lanes(), c.in_turns, c.whole, c.band_rows, end * factor});
    best = std::min(best, end * factor);
  }
  return *std::ranges::find_if(
      choices, [&](const BwdSchedule& c) { return c.makespan <= best * tolerance; });
}

}  // namespace magi
