#include "schedule/forward_choice.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "planner/ceil_div.h"
#include "schedule/makespan.h"

namespace magi {
namespace {

// A bound and no cost: 64 rows of a tile share a warpgroup and must hold a whole token.
constexpr int64_t kMaxPack = 64;
constexpr double kRounding = 1. - 1e-9;  // of a bound that is computed in another order

double step_cost(int64_t head_dim, const FwdVariant& variant, const FwdCosts& costs) {
  for (const FwdTileStep& tile : kFwdTileSteps)
    if (tile.head_dim == head_dim && tile.block_m == variant.block_m &&
        tile.block_n == variant.block_n)
      return costs.*tile.step;
  throw std::invalid_argument("no forward kernel for these tiles");
}

FwdTiling tiling_of(const FwdVariant& variant) {
  return {variant.block_m / variant.pack, variant.block_n};
}

double work_cost(const FwdWorkList& work, const FwdShape& shape, const FwdVariant& variant,
                 const FwdCosts& costs) {
  if (work.tiles.empty()) return 0.;
  const int64_t head_groups = shape.heads.heads_q / variant.pack;
  const double step = step_cost(shape.heads.head_dim, variant, costs);
  const auto num_tiles = static_cast<int64_t>(work.tiles.size());
  const auto num_sms = static_cast<double>(shape.num_sms);
  if (static_cast<double>(head_groups * num_tiles) > costs.few_items * num_sms) {
    const double sum = step * static_cast<double>(work.steps) +
                       costs.masked_cost * static_cast<double>(work.masked_steps) +
                       costs.tile_cost * static_cast<double>(num_tiles);
    const double longest = step * work.tiles.front().num_steps + costs.tile_cost;
    return std::max(static_cast<double>(head_groups) * sum / num_sms, longest);
  }
  Makespan makespan(shape.num_sms);
  for (const FwdTile& tile : work.tiles)
    makespan.add(step * tile.num_steps + costs.tile_cost, head_groups);
  return makespan.last();
}

// A bound from below on the cost of any list with this kernel: all visible cells are in its steps
// (slices share none), and the rows of the longest slice are in its tiles.
double least_cost(int64_t area, int64_t longest_slice_rows, const FwdShape& shape,
                  const FwdVariant& variant, const FwdCosts& costs) {
  const int64_t tile_q = variant.block_m / variant.pack;
  const double head_groups = static_cast<double>(shape.heads.heads_q / variant.pack);
  const double steps = static_cast<double>(ceil_div(area, tile_q * variant.block_n));
  const double tiles = static_cast<double>(ceil_div(longest_slice_rows, tile_q));
  const double sum =
      step_cost(shape.heads.head_dim, variant, costs) * steps + costs.tile_cost * tiles;
  return head_groups * sum / static_cast<double>(shape.num_sms);
}

// The most steps of a part, or none if the walks are already short enough.
std::optional<int64_t> steps_of_a_part(const FwdWorkList& whole, int64_t head_groups,
                                       int64_t num_sms, const FwdCosts& costs) {
  const int64_t even = ceil_div(head_groups * whole.steps, num_sms);  // if the work could be even
  const int64_t longest = whole.tiles.empty() ? 0 : whole.tiles.front().num_steps;
  const double of_longest = std::ceil(static_cast<double>(longest) / costs.most_parts);
  const double least = std::ceil(std::max({of_longest, costs.least_steps, 1.}));
  const int64_t steps = std::max(even, static_cast<int64_t>(least));
  if (longest < 2 * steps) return std::nullopt;
  return steps;
}

// The number of kv heads that are walked together, spread evenly over the sections: those whose K
// and V fit in the L2, and more where these would give the processors too few items, because a
// section's longest items are followed by its shortest ones, which fill the end of the launch
// alone.
int64_t heads_per_section(const FwdWorkList& work, const FwdShape& shape, const FwdVariant& variant,
                          const FwdCosts& costs) {
  const LaunchHeads& heads = shape.heads;
  // K and V of a kv head in 16 bits. V counts as wide as K, which is too much with narrower values.
  const int64_t head_bytes = std::max<int64_t>(work.active_keys, 1) * heads.head_dim * 2 * 2;
  const double fit =
      std::max(std::floor(costs.section_bytes / static_cast<double>(head_bytes)), 1.);
  const int64_t tiles = std::max<int64_t>(static_cast<int64_t>(work.tiles.size()), 1);
  const int64_t items = tiles * (heads.heads_q / heads.heads_kv / variant.pack);  // of a kv head
  const double filling =
      std::ceil(costs.few_items * static_cast<double>(shape.num_sms) / static_cast<double>(items));
  const auto all = static_cast<double>(heads.heads_kv);
  const auto together = static_cast<int64_t>(std::min(std::max(fit, filling), all));
  return ceil_div(heads.heads_kv, ceil_div(heads.heads_kv, together));
}

}  // namespace

std::vector<FwdVariant> fwd_variants(const LaunchHeads& heads) {
  int64_t widest = 1;
  while (widest < kMaxPack && heads.heads_q / heads.heads_kv % (2 * widest) == 0) widest *= 2;
  std::vector<FwdVariant> found;
  for (int64_t pack = widest;; pack = 1) {
    for (const FwdTileStep& tile : kFwdTileSteps)
      if (tile.head_dim == heads.head_dim) found.push_back({pack, tile.block_m, tile.block_n});
    if (pack == 1) break;
  }
  return found;
}

FwdWorkList fwd_whole_list(std::span<const Slice> slices, const FwdShape& shape,
                           const FwdVariant& variant, const FwdCosts& costs) {
  return build_fwd_work_list(slices, shape.num_q, shape.num_k, tiling_of(variant), costs);
}

std::vector<FwdChoice> fwd_choices(FwdWorkList whole, const FwdShape& shape,
                                   const FwdVariant& variant, const FwdCosts& costs) {
  std::vector<FwdChoice> found;
  const auto offer = [&](FwdWorkList&& work, double more) {
    const double cost = work_cost(work, shape, variant, costs) + more;
    const int64_t together = heads_per_section(work, shape, variant, costs);
    found.push_back({variant, std::move(work), cost, together});
  };
  const int64_t head_groups = shape.heads.heads_q / variant.pack;
  const auto steps = steps_of_a_part(whole, head_groups, shape.num_sms, costs);
  std::optional<FwdWorkList> parts;
  if (steps) parts = whole;
  offer(std::move(whole), 0.);
  if (!parts) return found;
  split_long_walks(*parts, shape.num_q, variant.block_n, *steps);
  const double merges = costs.merge_cost * static_cast<double>(parts->num_parts - 1);
  if (parts->num_parts * shape.num_q <= std::numeric_limits<int32_t>::max())
    offer(std::move(*parts), merges);
  return found;
}

FwdChoice choose_fwd(std::span<const Slice> slices, const FwdShape& shape, const FwdCosts& costs) {
  std::optional<FwdChoice> best;
  int64_t total_area = 0, widest = 0;
  for (const Slice& s : slices) {
    total_area += area(s);
    widest = std::max(widest, s.q_end - s.q_start);
  }
  for (const FwdVariant& variant : fwd_variants(shape.heads)) {
    // Making a list takes most of the time; one that cannot be better is left out.
    const double least = least_cost(total_area, widest, shape, variant, costs);
    if (best && least * kRounding > best->cost) continue;
    FwdWorkList whole = fwd_whole_list(slices, shape, variant, costs);
    for (FwdChoice& choice : fwd_choices(std::move(whole), shape, variant, costs))
      if (!best || choice.cost < best->cost) best = std::move(choice);
  }
  if (!best)
    throw std::invalid_argument("no forward kernel for head_dim " +
                                std::to_string(shape.heads.head_dim));
  return *std::move(best);
}

}  // namespace magi
