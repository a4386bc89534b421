// What the choice of a forward's kernel, work list and heads at a time is computed with.
//
// `python -m tools.fit_schedule` replays the choice with other values on records of
// `benchmarks/kernel/schedules.py`, and prints what each of them is worth and lines for this
// struct.
#pragma once

#include <cstdint>
#include <iterator>
#include <string_view>
#include <utility>

namespace magi {

// A reference step (ref) is the time of a 128 x 128 step of head_dim 128 in an older kernel, which
// took maxima in every step. A step is one query tile times one key tile, whatever its size.
struct FwdCosts {
  // The time of one step, named by head_dim, query rows and keys. Fitted to one H200 at 16k tokens,
  // head_dim 192 and 256 at 4k and 16k (docs/design/forward_kernel.md).
  double step_64_128_128 = 0.66;   // ref
  double step_64_192_128 = 0.86;   // ref
  double step_96_128_128 = 0.85;   // ref, between 64 and 128 by cells of a step; to be measured
  double step_96_192_96 = 0.85;    // ref, the same
  double step_128_192_80 = 0.80;   // ref
  double step_128_192_64 = 0.68;   // ref: no steps of their own were fitted, see 80 keys
  double step_128_128_128 = 0.90;  // ref
  double step_192_192_80 = 1.02;   // ref, with values of 128
  double step_192_128_128 = 1.05;  // ref
  double step_256_128_80 = 1.08;   // ref

  // The estimate: a sum of steps, or for few items the simulation of the launch (work_cost).
  double tile_cost = 0.3;     // ref: starting a tile and writing it out
  double masked_cost = 0.07;  // ref: a masked step over an unmasked one; in the sum only
  double merge_cost = 30.;  // ref: merging one part into another: a few small launches, about 50 us
  // The last wave matters in a launch of fewer items, and in a section of heads (measured with 8 to
  // 32 kv heads, docs/design/forward_kernel.md).
  double few_items = 8.;  // items for every processor

  // Which parts of long walks are looked at.
  double most_parts = 8.;   // parts of a walk: each has an output of its own, in fp32
  double least_steps = 8.;  // steps of a part; an estimate

  // Heads at a time. The L2 has 50 MiB, and more than K and V go through it.
  double section_bytes = 33554432.;  // bytes of K and V that are walked together

  // The list: where a tile ends that may end with any of several strips. Estimates.
  double end_tile_cost = 0.5;     // steps: starting a tile and writing it out
  double end_masked_cost = 0.15;  // steps: a masked step over an unmasked one
};

inline constexpr FwdCosts kFwdCosts;

// A compiled kernel's tile, and what a step of it takes.
struct FwdTileStep {
  int64_t head_dim, block_m, block_n;
  double FwdCosts::* step;
};

// All that are compiled. Of choices with equal cost, the one that stands first here is taken.
inline constexpr FwdTileStep kFwdTileSteps[] = {
    {64, 128, 128, &FwdCosts::step_64_128_128},   {64, 192, 128, &FwdCosts::step_64_192_128},
    {96, 128, 128, &FwdCosts::step_96_128_128},   {96, 192, 96, &FwdCosts::step_96_192_96},
    {128, 192, 80, &FwdCosts::step_128_192_80},   {128, 192, 64, &FwdCosts::step_128_192_64},
    {128, 128, 128, &FwdCosts::step_128_128_128}, {192, 192, 80, &FwdCosts::step_192_192_80},
    {192, 128, 128, &FwdCosts::step_192_128_128}, {256, 128, 80, &FwdCosts::step_256_128_80},
};

using FwdCostField = std::pair<std::string_view, double FwdCosts::*>;

// Every field by its name.
inline constexpr FwdCostField kFwdCostFields[] = {
    {"step_64_128_128", &FwdCosts::step_64_128_128},
    {"step_64_192_128", &FwdCosts::step_64_192_128},
    {"step_96_128_128", &FwdCosts::step_96_128_128},
    {"step_96_192_96", &FwdCosts::step_96_192_96},
    {"step_128_192_80", &FwdCosts::step_128_192_80},
    {"step_128_192_64", &FwdCosts::step_128_192_64},
    {"step_128_128_128", &FwdCosts::step_128_128_128},
    {"step_192_192_80", &FwdCosts::step_192_192_80},
    {"step_192_128_128", &FwdCosts::step_192_128_128},
    {"step_256_128_80", &FwdCosts::step_256_128_80},
    {"tile_cost", &FwdCosts::tile_cost},
    {"masked_cost", &FwdCosts::masked_cost},
    {"merge_cost", &FwdCosts::merge_cost},
    {"few_items", &FwdCosts::few_items},
    {"most_parts", &FwdCosts::most_parts},
    {"least_steps", &FwdCosts::least_steps},
    {"section_bytes", &FwdCosts::section_bytes},
    {"end_tile_cost", &FwdCosts::end_tile_cost},
    {"end_masked_cost", &FwdCosts::end_masked_cost},
};
static_assert(std::size(kFwdCostFields) * sizeof(double) == sizeof(FwdCosts));

}  // namespace magi
