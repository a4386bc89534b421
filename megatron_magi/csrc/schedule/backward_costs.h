// What the choice of a backward's work list and schedule is computed with.
//
// `python -m tools.fit_schedule` replays the choice with other values on records of
// `benchmarks/kernel/schedules.py`, and prints what each of them is worth and lines for this
// struct.
#pragma once

#include <iterator>
#include <string_view>
#include <utility>

namespace magi {

// Units: a step is a query tile of one query head times a key tile. Bytes are of Q, dO and dQ. A
// penalty is a share of the time, mostly for each doubling of something beyond its threshold;
// where a comment says "squared", for the doublings squared. docs/design/backward_kernel.md
// explains the choice.
struct BwdCosts {
  // The list. Loading a key tile and storing its gradients moves 96 KiB, where a step of 8 heads
  // moves 8 x 64 KiB; an estimate.
  double tile_overhead = 0.5;  // steps for each query head, of a key tile
  // Of the masks of the benchmark, grouped ones have at most 2.8 groups to a row (prefix trees),
  // and random blocks have 6 to 60.
  double most_overlap = 4.;  // groups that a row lies in, of a list that is not scattered
  // Which items stand together with those of their document. Estimates.
  double uneven_ratio = 1.3;   // ratio: of a group's longest item to its shortest, above it uneven
  double uneven_share = 0.5;   // share of all steps in uneven groups, above which a list is uneven
  double fewest_changes = 2.;  // for each group, how often neighbours differ; with more, fast mode

  // The simulation of a launch.
  double block_overhead = 3.;   // steps: start, keys, gradients
  double split_overhead = 1.5;  // steps: sums of a block, written and read again
  double even_slack = 1.002;    // ratio: at most so far from equal shares is as good as equal
  double tolerance = 1.005;     // ratio: the first schedule so near the best is taken, fast mode

  // Fast mode: what blocks do not share in the cache. Fitted to 21 masks and lengths with 10
  // schedules each on an H200.
  double heads_penalty = 0.02;      // share, for twice the kv heads at a time
  double drift_penalty = 0.02;      // share, for twice the bytes over which uneven items spread
  double drift_bytes = 67e6;        // bytes, from which on
  double lane_drift_bytes = 134e6;  // bytes, the same if lanes run one after another
  // Processors of different speed drift apart in a launch of even items, if the cache does not hold
  // all that a block walks.
  double speed_penalty = 0.016;  // share, for twice the bytes of that drift
  double speed_bytes = 10e6;     // bytes, from which on
  double speed_spread = 0.005;   // ratio: the fastest processor of an H200 over the slowest, less 1
  double shared_bytes = 34e6;    // bytes that the cache holds, wherever blocks are in them
  double even_penalty = 0.05;    // share, for twice the bytes that even items go through, squared
  double even_bytes = 67e6;      // bytes, from which on
  double cache_penalty = 0.1;    // share, if grouped items evict each other's tiles
  double cache_bytes = 150e6;    // bytes of the kv heads at a time, from which on they do
  // Of 16 rank views with documents, each under 16 schedules on an H200, such schedules took up to
  // 17 % more time than the simulation says.
  double grouped_penalty = 0.06;  // share, if grouped items have many query heads at a time
  double grouped_heads = 32.;     // query heads, from which on they are many
  double wide_penalties = 3.;     // times all of fast mode's penalties for wide rows

  // Scattered blocks: items of about one length start together and walk at one pace, as long as
  // what they spread over fits the cache; the next ones start when these end, which is not at one
  // time. So short blocks of one lane are best. Fitted to 20 schedules of random blocks of 128 at
  // 16k and 64k tokens on an H200.
  double scattered_penalty = 0.055;        // share, for twice the bytes of spread, squared
  double scattered_bytes = 24e6;           // bytes, from which on
  double scattered_lanes_penalty = 0.065;  // share, for twice the lanes, beyond those bytes

  // Deterministic mode, where blocks of one lane (kv head and split) wait for each other and so go
  // through the same rows together. Uneven items of a lane are at different rows and share less of
  // what they load: the less, the more bytes a row has in all heads of a lane, and the more kv
  // heads run at a time. Fitted to 50 sweeps of 6 to 12 schedules on an H200
  // (docs/design/backward_kernel.md, deterministic mode).
  // Blocks of a single kv head, all in one queue, took up to a third more time than the simulation
  // says.
  double fewest_lanes = 2.;        // lanes of a section, where there are so many
  double lanes_penalty = 0.005;    // share, for twice the lanes at a time
  double splits_penalty = 0.04;    // share, for twice the splits if heads are the outer loop
  double lane_row_penalty = 0.02;  // share, for twice the bytes of a row in a lane, uneven items
  double lane_row_bytes = 4096.;   // bytes, from which on
  // From a block's addition to the next block's in steps of head_dim 128: the addition is complete
  // after about 0.4, the signal is on its way for 0.4 to 0.6, and is seen within 0.3 more.
  double lag = 1.3;  // steps

  // Wide rows (head_dim 256). The factor and the tolerance of deterministic mode are as in fast
  // mode, or wider, because lanes evict each other's rows. A step takes longer, so the lag is
  // shorter.
  double wide_row_bytes = 2048.;  // bytes of a row in one head, from which on it is wide
  double wide_tolerance = 1.015;  // ratio: like `tolerance`, deterministic mode
  double wide_lag = 0.8;          // steps

  // Which schedules are looked at.
  double max_split_blocks_per_sm = 32.;      // blocks: with more, splits do not pay
  double max_scattered_blocks_per_sm = 64.;  // blocks: the same for scattered blocks
  double max_whole_blocks_per_sm = 64.;      // blocks: with more, the last ones take less than 1 %
  // Of a block on average, for each of those that it waits for. Beyond that, turns cost less than
  // the pass over partial sums, up to 2 %.
  double steps_for_turn = 64.;   // steps
  double most_split_heads = 2.;  // kv heads at the end, if the others are whole
};

inline constexpr BwdCosts kBwdCosts;

using BwdCostField = std::pair<std::string_view, double BwdCosts::*>;

// Every field by its name.
inline constexpr BwdCostField kBwdCostFields[] = {
    {"tile_overhead", &BwdCosts::tile_overhead},
    {"most_overlap", &BwdCosts::most_overlap},
    {"uneven_ratio", &BwdCosts::uneven_ratio},
    {"uneven_share", &BwdCosts::uneven_share},
    {"fewest_changes", &BwdCosts::fewest_changes},
    {"block_overhead", &BwdCosts::block_overhead},
    {"split_overhead", &BwdCosts::split_overhead},
    {"even_slack", &BwdCosts::even_slack},
    {"tolerance", &BwdCosts::tolerance},
    {"heads_penalty", &BwdCosts::heads_penalty},
    {"drift_penalty", &BwdCosts::drift_penalty},
    {"drift_bytes", &BwdCosts::drift_bytes},
    {"lane_drift_bytes", &BwdCosts::lane_drift_bytes},
    {"speed_penalty", &BwdCosts::speed_penalty},
    {"speed_bytes", &BwdCosts::speed_bytes},
    {"speed_spread", &BwdCosts::speed_spread},
    {"shared_bytes", &BwdCosts::shared_bytes},
    {"even_penalty", &BwdCosts::even_penalty},
    {"even_bytes", &BwdCosts::even_bytes},
    {"cache_penalty", &BwdCosts::cache_penalty},
    {"cache_bytes", &BwdCosts::cache_bytes},
    {"grouped_penalty", &BwdCosts::grouped_penalty},
    {"grouped_heads", &BwdCosts::grouped_heads},
    {"wide_penalties", &BwdCosts::wide_penalties},
    {"scattered_penalty", &BwdCosts::scattered_penalty},
    {"scattered_bytes", &BwdCosts::scattered_bytes},
    {"scattered_lanes_penalty", &BwdCosts::scattered_lanes_penalty},
    {"fewest_lanes", &BwdCosts::fewest_lanes},
    {"lanes_penalty", &BwdCosts::lanes_penalty},
    {"splits_penalty", &BwdCosts::splits_penalty},
    {"lane_row_penalty", &BwdCosts::lane_row_penalty},
    {"lane_row_bytes", &BwdCosts::lane_row_bytes},
    {"lag", &BwdCosts::lag},
    {"wide_row_bytes", &BwdCosts::wide_row_bytes},
    {"wide_tolerance", &BwdCosts::wide_tolerance},
    {"wide_lag", &BwdCosts::wide_lag},
    {"max_split_blocks_per_sm", &BwdCosts::max_split_blocks_per_sm},
    {"max_scattered_blocks_per_sm", &BwdCosts::max_scattered_blocks_per_sm},
    {"max_whole_blocks_per_sm", &BwdCosts::max_whole_blocks_per_sm},
    {"steps_for_turn", &BwdCosts::steps_for_turn},
    {"most_split_heads", &BwdCosts::most_split_heads},
};
static_assert(std::size(kBwdCostFields) * sizeof(double) == sizeof(BwdCosts));

}  // namespace magi
