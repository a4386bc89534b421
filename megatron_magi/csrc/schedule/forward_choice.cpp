#include "schedule/forward_choice.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "planner/ceil_div.h"
#include "schedule/makespan.h"

namespace magi {
namespace {

struct TileCost {
  int64_t head_dim, block_m, block_n;
  double step;
};

// Compiled tiles, each with the time of one step, in units of a 128 x 128 step of head_dim 128 of
// the kernel that took maxima in every step. Fitted to one H200 at 16k tokens (192 and 256: at 4k
// and 16k), docs/kernel_notes.md.
constexpr TileCost kTiles[] = {
    {64, 128, 128, 0.66},
    {64, 192, 128, 0.86},
    // Between those of 64 and 128 by cells of a step, to be measured.
    {96, 128, 128, 0.85},
    {96, 192, 96, 0.85},
    {128, 192, 80, 0.80},
    {128, 192, 64, 0.68},  // like that of 80 keys
    {128, 128, 128, 0.90},
    {192, 192, 80, 1.02},  // with values of 128
    {192, 128, 128, 1.05},
    {256, 128, 80, 1.08},
};
constexpr double kTileCost = 0.3;     // starting a tile and writing it out
constexpr double kMaskedCost = 0.07;  // a masked step over an unmasked one
constexpr double kMergeCost = 30.;    // of merging two parts: a few small launches, about 50 us
// Items per processor below which the last wave matters: those of a launch, and of a section of
// heads (measured with 8 to 32 kv heads, docs/kernel_notes.md).
constexpr int64_t kFewItems = 8;
constexpr int64_t kMaxParts = 8;    // of a split key walk
constexpr int64_t kLeastSteps = 8;  // the fewest steps of a part
constexpr int64_t kMaxPack = 64;
constexpr double kRounding = 1. - 1e-9;  // of a bound that is computed in another order
constexpr int64_t kL2Budget = 32 << 20;  // bytes of K and V walked together; the L2 has 50 MiB

double step_cost(int64_t head_dim, const FwdVariant& variant) {
  for (const TileCost& tile : kTiles)
    if (tile.head_dim == head_dim && tile.block_m == variant.block_m &&
        tile.block_n == variant.block_n)
      return tile.step;
  throw std::invalid_argument("no forward kernel for these tiles");
}

FwdTiling tiling_of(const FwdVariant& variant) {
  FwdTiling tiling;
  tiling.tile_q = variant.block_m / variant.pack;
  tiling.tile_k = variant.block_n;
  return tiling;
}

double work_cost(const FwdWorkList& work, const FwdHeads& heads, const FwdVariant& variant,
                 int64_t num_sms) {
  if (work.tiles.empty()) return 0.;
  const int64_t units = heads.heads_q / variant.pack;
  const double step = step_cost(heads.head_dim, variant);
  const auto num_tiles = static_cast<int64_t>(work.tiles.size());
  if (units * num_tiles > kFewItems * num_sms) {
    const double sum = step * static_cast<double>(work.steps) +
                       kMaskedCost * static_cast<double>(work.masked_steps) +
                       kTileCost * static_cast<double>(num_tiles);
    const double longest = step * work.tiles.front().num_steps + kTileCost;
    return std::max(static_cast<double>(units) * sum / static_cast<double>(num_sms), longest);
  }
  Makespan makespan(num_sms);
  for (const FwdTile& tile : work.tiles) makespan.add(step * tile.num_steps + kTileCost, units);
  return makespan.last();
}

// What any work list with this kernel costs at least: every visible cell and every row that sees a
// key is in a tile. Slices share no cell.
double least_cost(int64_t area, int64_t rows, const FwdHeads& heads, const FwdVariant& variant,
                  int64_t num_sms) {
  const int64_t tile_q = variant.block_m / variant.pack;
  const double units = static_cast<double>(heads.heads_q / variant.pack);
  const double steps = static_cast<double>(ceil_div(area, tile_q * variant.block_n));
  const double tiles = static_cast<double>(ceil_div(rows, tile_q));
  const double sum = step_cost(heads.head_dim, variant) * steps + kTileCost * tiles;
  return units * sum / static_cast<double>(num_sms);
}

// The most steps of a part, or none if the walks are already short enough.
std::optional<int64_t> steps_of_a_part(const FwdWorkList& whole, int64_t units, int64_t num_sms) {
  const int64_t even = ceil_div(units * whole.steps, num_sms);  // if the work could be even
  const int64_t longest = whole.tiles.empty() ? 0 : whole.tiles.front().num_steps;
  const int64_t steps = std::max({even, ceil_div(longest, kMaxParts), kLeastSteps});
  if (longest < 2 * steps) return std::nullopt;
  return steps;
}

}  // namespace

std::vector<FwdVariant> fwd_variants(const FwdHeads& heads) {
  int64_t widest = 1;
  while (widest < kMaxPack && heads.heads_q / heads.heads_kv % (2 * widest) == 0) widest *= 2;
  std::vector<FwdVariant> found;
  for (int64_t pack = widest;; pack = 1) {
    for (const TileCost& tile : kTiles)
      if (tile.head_dim == heads.head_dim) found.push_back({pack, tile.block_m, tile.block_n});
    if (pack == 1) break;
  }
  return found;
}

FwdChoice choose_fwd(std::span<const Slice> slices, int64_t num_q, int64_t num_k,
                     const FwdHeads& heads, int64_t num_sms) {
  std::optional<FwdChoice> best;
  const auto offer = [&](const FwdVariant& variant, FwdWorkList&& work, double more) {
    const double cost = work_cost(work, heads, variant, num_sms) + more;
    if (!best || cost < best->cost) best = FwdChoice{variant, std::move(work), cost, 1};
  };
  int64_t total_area = 0, widest = 0;
  for (const Slice& s : slices) {
    total_area += area(s);
    widest = std::max(widest, s.q_end - s.q_start);
  }
  for (const FwdVariant& variant : fwd_variants(heads)) {
    // Making a list takes most of the time; one that cannot be better is left out.
    const double least = least_cost(total_area, widest, heads, variant, num_sms);
    if (best && least * kRounding > best->cost) continue;
    FwdWorkList work = build_fwd_work_list(slices, num_q, num_k, tiling_of(variant));
    const auto steps = steps_of_a_part(work, heads.heads_q / variant.pack, num_sms);
    std::optional<FwdWorkList> parts;
    if (steps) parts = work;
    offer(variant, std::move(work), 0.);
    if (!parts) continue;
    split_long_walks(*parts, num_q, variant.block_n, *steps);
    const double merges = kMergeCost * static_cast<double>(parts->num_parts - 1);
    if (parts->num_parts * num_q <= std::numeric_limits<int32_t>::max())
      offer(variant, std::move(*parts), merges);
  }
  if (!best)
    throw std::invalid_argument("no forward kernel for head_dim " + std::to_string(heads.head_dim));
  best->heads_per_section = heads_per_section(best->work, heads, best->variant, num_sms);
  return *std::move(best);
}

int64_t heads_per_section(const FwdWorkList& work, const FwdHeads& heads, const FwdVariant& variant,
                          int64_t num_sms) {
  const int64_t head_bytes = std::max<int64_t>(work.active_keys, 1) * heads.head_dim * 2 * 2;
  const int64_t fit = std::max<int64_t>(kL2Budget / head_bytes, 1);
  const int64_t tiles = std::max<int64_t>(static_cast<int64_t>(work.tiles.size()), 1);
  const int64_t items = tiles * (heads.heads_q / heads.heads_kv / variant.pack);  // of a kv head
  const int64_t filling = ceil_div(kFewItems * num_sms, items);
  const int64_t together = std::min(std::max(fit, filling), heads.heads_kv);
  return ceil_div(heads.heads_kv, ceil_div(heads.heads_kv, together));
}

}  // namespace magi
