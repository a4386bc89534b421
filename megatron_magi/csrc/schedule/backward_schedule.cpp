#include "schedule/backward_schedule.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "planner/ceil_div.h"
#include "schedule/backward_bands.h"
#include "schedule/backward_waits.h"
#include "schedule/makespan.h"

namespace magi {
namespace {

// A bound that is added up in another order may be off by it.
constexpr double kRounding = 1. - 1e-9;

// The problem that a schedule is chosen for, and the inputs of its costs.
struct Problem {
  const BwdWorkList& list;
  const BwdShape& shape;
  const BwdMode& mode;
  const BwdCosts& costs;

  double row_bytes() const {
    return static_cast<double>(shape.head_bytes) /
           static_cast<double>(std::max<int64_t>(shape.num_q, 1));
  }
  bool has_wide_rows() const { return row_bytes() >= costs.wide_row_bytes; }
  double tolerance() const {
    if (!mode.deterministic) return costs.tolerance;
    return has_wide_rows() ? costs.wide_tolerance : 1.;
  }
};

double block_overhead(const BwdCosts& costs, int64_t num_splits) {
  return costs.block_overhead + (num_splits > 1 ? costs.split_overhead : 0.);
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

std::vector<Stretch> stretches(const Problem& p, const Candidate& c) {
  const int64_t group = p.shape.group, num_heads_kv = p.shape.num_heads_kv;
  std::vector<Stretch> found;
  if (c.whole > 0) found.push_back({{1, group, c.whole}, block_overhead(p.costs, 1), 1.});
  const double rows = static_cast<double>(c.band_rows);
  const auto bands = c.band_rows > 0 ? static_cast<int64_t>(std::ceil(p.list.even_rows / rows)) : 1;
  const int64_t sections = (num_heads_kv - c.whole) * c.splits / c.lanes() * bands;
  found.push_back({{c.lanes(), group / c.splits, sections},
                   block_overhead(p.costs, c.splits * bands),
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
double simulate(const Problem& p, std::span<const Stretch> launch, double total) {
  const int64_t num_sms = p.shape.num_sms;
  const double even = total / static_cast<double>(num_sms);
  if (launch.size() == 1 &&
      most_makespan(p.list, num_sms, launch.front(), total) <= even * p.costs.even_slack)
    return even;
  Makespan makespan(num_sms);
  for (const Stretch& part : launch)
    for (int64_t section = 0; section < part.lanes.sections; ++section)
      for (const BwdItem& item : p.list.items) makespan.add(part.cost(item), part.lanes.count);
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

// cache_factor for scattered blocks.
double scattered_factor(const Problem& p, const Candidate& candidate) {
  const double lanes = static_cast<double>(candidate.lanes());
  const double bytes = p.list.scattered_rows * p.row_bytes() * lanes *
                       static_cast<double>(p.shape.group / candidate.splits);
  const double beyond = doublings(bytes, p.costs.scattered_bytes);
  return 1. + p.costs.scattered_penalty * beyond * beyond +
         p.costs.scattered_lanes_penalty * std::log2(lanes) * std::min(beyond, 1.);
}

double even_bytes_factor(const Problem& p, double bytes) {
  return p.costs.even_penalty * std::pow(doublings(bytes, p.costs.even_bytes), 2);
}

// The part of the factor below for even items: the bytes that all lanes go through, and those over
// which processors of different speed drift apart, but within the rows of a block. In fast mode a
// processor does so many `steps`.
double even_factor(const Problem& p, double steps, const Candidate& candidate) {
  const double row = p.row_bytes(), all_rows = p.list.even_rows;
  const double rows = candidate.band_rows > 0 ? static_cast<double>(candidate.band_rows) : all_rows;
  const double even = rows * row * static_cast<double>(candidate.lanes());
  const double of_block =
      rows * row * static_cast<double>(p.shape.group / candidate.common_splits());
  const double drift = of_block > p.costs.shared_bytes
                           ? std::min(p.costs.speed_spread * steps * kBwdTileQ * row, of_block)
                           : 0.;
  return even_bytes_factor(p, even) + p.costs.speed_penalty * doublings(drift, p.costs.speed_bytes);
}

// What items that are grouped by documents add to the factor below.
double grouped_factor(const Problem& p, double heads, double of_block) {
  if (!p.list.grouped) return 0.;
  const double bytes = heads * static_cast<double>(p.shape.head_bytes);
  return (bytes > p.costs.cache_bytes ? p.costs.cache_penalty : 0.) +
         (heads * of_block > p.costs.grouped_heads ? p.costs.grouped_penalty : 0.);
}

// A factor for what the simulation ignores: blocks that run together may not share what they load.
double cache_factor(const Problem& p, double steps, const Candidate& candidate) {
  if (p.list.scattered_rows > 0.) return scattered_factor(p, candidate);
  const double heads = static_cast<double>(candidate.heads);
  const double of_block = static_cast<double>(p.shape.group / candidate.common_splits());
  // Each of the kv heads that run at a time spreads over as many bytes. If items are grouped, the
  // heads start together.
  const double drift =
      p.list.uneven_rows * p.row_bytes() * of_block * (p.list.grouped ? 1. : heads);
  const double factor = 1. + p.costs.heads_penalty * std::log2(heads) +
                        even_factor(p, steps, candidate) + grouped_factor(p, heads, of_block);
  const double shared = candidate.common_splits() > 1 && candidate.one_lane
                            ? p.costs.lane_drift_bytes
                            : p.costs.drift_bytes;
  return factor * (1. + p.costs.drift_penalty * doublings(drift, shared));
}

// The same for fast mode. Where tiles have 64 keys, a product moves twice the bytes, and what is
// not shared costs more.
double sharing_factor(const Problem& p, double steps, const Candidate& candidate) {
  const double factor = cache_factor(p, steps, candidate);
  return p.has_wide_rows() ? 1. + p.costs.wide_penalties * (factor - 1.) : factor;
}

// The same for deterministic mode: lanes do not share what they load.
double lanes_factor(const Problem& p, const Candidate& candidate) {
  if (p.has_wide_rows()) return cache_factor(p, 0., candidate);
  if (!p.list.heads_inner)
    return 1. + p.costs.splits_penalty * std::log2(static_cast<double>(candidate.splits));
  const double lanes = static_cast<double>(candidate.lanes());
  const double even = p.list.even_rows * p.row_bytes() * lanes;
  const double share = p.list.uneven_rows / std::max(p.list.uneven_rows + p.list.even_rows, 1.);
  const double lane_row = p.row_bytes() * static_cast<double>(p.shape.group / candidate.splits);
  const double uneven = share * doublings(lane_row, p.costs.lane_row_bytes) *
                        std::log2(2. * static_cast<double>(candidate.heads));
  return (1. + p.costs.lanes_penalty * std::log2(lanes) + even_bytes_factor(p, even)) *
         (1. + p.costs.lane_row_penalty * uneven);
}

// Whether the partial sums of this many splits stay small (1.1 GB at head_dim 128, of scattered
// blocks 2.2 GB).
bool may_split(const Problem& p, int64_t splits) {
  const double most = p.list.scattered_rows > 0. ? p.costs.max_scattered_blocks_per_sm
                                                 : p.costs.max_split_blocks_per_sm;
  const auto items = static_cast<int64_t>(p.list.items.size());
  return static_cast<double>(items * p.shape.num_heads_kv * splits / 2) <=
         most * static_cast<double>(p.shape.num_sms);
}

// Items of one document that differ in length, or scattered ones: their blocks drift apart.
bool drifts(const BwdWorkList& list) {
  return !list.grouped && list.uneven_rows + list.scattered_rows > 0.;
}

// Kv heads and splits that can run at a time.
int64_t most_lanes(const Problem& p) {
  int64_t splits = 1;
  while (p.shape.group % (2 * splits) == 0 && may_split(p, 2 * splits)) splits *= 2;
  return splits * p.shape.num_heads_kv;
}

// The candidates of deterministic mode, by lanes, and of fast mode without turns, by splits.
std::vector<Candidate> at_once(const Problem& p) {
  const bool deterministic = p.mode.deterministic;
  const int64_t group = p.shape.group, num_heads_kv = p.shape.num_heads_kv;
  const auto fewest = static_cast<int64_t>(p.costs.fewest_lanes);
  const int64_t least_lanes = deterministic ? std::min(fewest, most_lanes(p)) : 0;
  std::vector<Candidate> found;
  for (int64_t splits = 1; splits <= group && group % splits == 0; splits *= 2) {
    if (splits > 1 && !may_split(p, splits)) break;
    if (splits > 1 && p.list.scattered_rows > 0. && !deterministic)
      found.push_back({splits, 1, true});
    for (int64_t heads = 1; heads <= num_heads_kv; ++heads)
      if (num_heads_kv % heads == 0 && splits * heads >= least_lanes)
        found.push_back({splits, heads});
  }
  if (deterministic) std::ranges::stable_sort(found, {}, &Candidate::lanes);
  return found;
}

// Whether the parts of a tile that run together may wait for one another at their end.
bool have_time_for_turns(const Problem& p, int64_t splits, int64_t together) {
  const auto waits = (together - 1) * static_cast<int64_t>(p.list.items.size());
  return static_cast<double>(p.list.steps * (p.shape.group / splits)) >=
         p.costs.steps_for_turn * static_cast<double>(waits);
}

// The parts of a tile that run together if one lane starts after another: a lane of few items
// leaves processors to the next ones.
int64_t parts_together(const Problem& p, int64_t splits) {
  const auto items = std::max<int64_t>(static_cast<int64_t>(p.list.items.size()), 1);
  return std::min(splits, ceil_div(p.shape.num_sms, items));
}

// Whether the last kv heads alone may be split.
bool has_end(const Problem& p) {
  const auto blocks = static_cast<int64_t>(p.list.items.size()) * p.shape.num_heads_kv;
  return p.list.scattered_rows == 0. &&
         static_cast<double>(blocks) <=
             p.costs.max_whole_blocks_per_sm * static_cast<double>(p.shape.num_sms);
}

// Those in which parts of a tile take turns: one lane at a time of items that drift apart, the last
// kv head alone in splits, and bands of rows of long even items.
std::vector<Candidate> in_turns(const Problem& p) {
  const BwdWorkList& list = p.list;
  const int64_t group = p.shape.group, num_heads_kv = p.shape.num_heads_kv;
  const int64_t most_heads =
      has_end(p) ? std::min(static_cast<int64_t>(p.costs.most_split_heads), num_heads_kv - 1) : 0;
  std::vector<Candidate> found;
  int64_t most = 1;
  for (int64_t splits = 2; splits <= group && group % splits == 0; splits *= 2) {
    if ((drifts(list) || list.even_rows > 0.) &&
        have_time_for_turns(p, splits, parts_together(p, splits)))
      found.push_back({splits, 1, true, true});
    for (int64_t split_heads = 1; split_heads <= most_heads; ++split_heads)
      found.push_back({splits, 1, true, true, num_heads_kv - split_heads});
    most = splits;
  }
  const bool is_even = list.uneven_rows + list.scattered_rows == 0.;
  const double bytes = p.costs.shared_bytes;
  const int64_t band_rows = is_even ? rows_of_band(list.even_rows, p.row_bytes(), bytes) : 0;
  if (band_rows > 0) found.push_back({most, 1, true, true, 0, band_rows});
  return found;
}

std::vector<Candidate> candidates(const Problem& p) {
  std::vector<Candidate> found = at_once(p);
  if (p.mode.deterministic || !p.mode.may_take_turns) return found;
  for (Candidate& c : found)
    c.in_turns = c.splits > 1 && have_time_for_turns(p, c.splits, c.splits);
  if (p.list.grouped) return found;
  std::erase_if(found, [](const Candidate& c) { return c.one_lane; });
  const std::vector<Candidate> more = in_turns(p);
  found.insert(found.end(), more.begin(), more.end());
  // Of equally good ones, those that need no partial sums.
  std::ranges::stable_partition(found, [](const Candidate& c) { return !c.has_partial_sums(); });
  return found;
}

// How long candidates for one list take.
class Times {
 public:
  explicit Times(const Problem& problem) : p_(problem) {
    // Items that share no rows hardly wait and are simulated as in fast mode.
    if (p_.mode.deterministic && p_.list.heads_inner)
      waits_.emplace(p_.list, p_.has_wide_rows() ? p_.costs.wide_lag : p_.costs.lag);
  }

  // None if it is above `most` for sure: simulations take most of the time.
  std::optional<double> of(const Candidate& c, double most) const {
    const int64_t num_sms = p_.shape.num_sms;
    const std::vector<Stretch> launch = stretches(p_, c);
    const double total = total_cost(p_.list, launch);
    const double steps = total / static_cast<double>(num_sms);
    const double factor =
        p_.mode.deterministic ? lanes_factor(p_, c) : sharing_factor(p_, steps, c);
    const double least = least_makespan(p_.list, num_sms, launch, total);
    if (least * factor * kRounding > most) return std::nullopt;
    const Stretch& last = launch.back();
    return factor * (waits_ ? waits_->makespan(num_sms, last.lanes, last.overhead)
                            : simulate(p_, launch, total));
  }

 private:
  const Problem& p_;
  std::optional<BwdWaits> waits_;
};

// The schedules of all candidates, or of all but those that cannot be near the best.
BwdSchedules timed(const Problem& p, bool all) {
  const Times times(p);
  BwdSchedules found{{}, p.tolerance()};
  double most = std::numeric_limits<double>::infinity();
  for (const Candidate& c : candidates(p)) {
    const std::optional<double> time = times.of(c, most);
    if (!time) continue;
    found.all.push_back({c.splits, c.lanes(), c.in_turns, c.whole, c.band_rows, *time});
    if (!all) most = std::min(most, *time * found.tolerance);
  }
  return found;
}

}  // namespace

BwdSchedules bwd_schedules(const BwdWorkList& list, const BwdShape& shape, const BwdMode& mode,
                           const BwdCosts& costs) {
  return timed({list, shape, mode, costs}, true);
}

BwdSchedule choose_bwd_schedule(const BwdWorkList& list, const BwdShape& shape, const BwdMode& mode,
                                const BwdCosts& costs) {
  const BwdSchedules found = timed({list, shape, mode, costs}, false);
  const double best = std::ranges::min(found.all, {}, &BwdSchedule::makespan).makespan;
  return *std::ranges::find_if(
      found.all, [&](const BwdSchedule& c) { return c.makespan <= best * found.tolerance; });
}

}  // namespace magi
