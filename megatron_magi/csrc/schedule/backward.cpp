#include "schedule/backward.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "planner/ceil_div.h"
#include "schedule/backward_costs.h"
#include "schedule/backward_order.h"
#include "schedule/backward_turns.h"

namespace magi {
namespace {

void check(const Slice& s, const BwdLengths& n) {
  if (s.q_start >= 0 && s.q_end <= n.num_q && s.k_start >= 0 && s.k_end <= n.num_k) return;
  throw std::invalid_argument(
      "a slice must lie in " + std::to_string(n.num_q) + " queries x " + std::to_string(n.num_k) +
      " keys, got q [" + std::to_string(s.q_start) + ", " + std::to_string(s.q_end) + ") k [" +
      std::to_string(s.k_start) + ", " + std::to_string(s.k_end) + "); cut it first");
}

// Walks the keys from left to right and keeps the slices that may meet the current tile.
class TileCutter {
 public:
  TileCutter(std::vector<Slice> slices, const BwdLengths& lengths, const BwdTiling& tiling)
      : slices_(std::move(slices)), lengths_(lengths), tiling_(tiling) {
    std::sort(slices_.begin(), slices_.end(), [](const Slice& a, const Slice& b) {
      return a.k_start != b.k_start ? a.k_start < b.k_start : a.q_start < b.q_start;
    });
    for (const Slice& s : slices_) {
      bounds_.push_back(s.k_start);
      bounds_.push_back(s.k_end);
    }
    std::sort(bounds_.begin(), bounds_.end());
  }

  // The next tile [start, end) and its slices; false at the end of the keys.
  bool next(Range& tile, std::vector<Slice>& cuts) {
    if (start_ >= lengths_.num_k) return false;
    activate(longest_end());
    tile = choose();
    cuts = cut_all(tile);
    start_ = tile.end;
    return true;
  }

 private:
  // Where a tile of all keys that it has room for ends.
  int64_t longest_end() const { return std::min(start_ + tiling_.tile_k, lengths_.num_k); }

  void activate(int64_t limit) {
    std::erase_if(active_, [&](const Slice& s) { return s.k_end <= start_; });
    while (next_ < slices_.size() && slices_[next_].k_start < limit) {
      active_.push_back(slices_[next_++]);
    }
  }

  // Chooses a whole tile or one that ends at the last slice boundary inside it, whichever costs
  // less per key. Documents longer than a tile are cut at their ends, and shorter ones share tiles.
  Range choose() const {
    const Range whole{start_, longest_end()};
    const auto above = std::upper_bound(bounds_.begin(), bounds_.end(), whole.end);
    if (above == bounds_.begin() || *(above - 1) <= start_ || *(above - 1) == whole.end) {
      return whole;
    }
    const Range shorter{start_, *(above - 1)};
    return cost_per_key(whole) < cost_per_key(shorter) ? whole : shorter;
  }

  double cost_per_key(Range tile) const {
    double cost = kBwdCosts.tile_overhead;
    for (const Slice& s : active_) {
      const Slice part = cut(s, {s.q_start, s.q_end}, tile);
      if (!part.empty()) cost += ceil_div(part.q_end - part.q_start, tiling_.tile_q);
    }
    return cost / tile.size();
  }

  std::vector<Slice> cut_all(Range tile) const {
    std::vector<Slice> cuts;
    for (const Slice& s : active_) {
      const Slice part = cut(s, {s.q_start, s.q_end}, tile);
      if (!part.empty()) cuts.push_back(part);
    }
    std::sort(cuts.begin(), cuts.end(),
              [](const Slice& a, const Slice& b) { return a.q_start < b.q_start; });
    return cuts;
  }

  std::vector<Slice> slices_;
  std::vector<int64_t> bounds_;
  std::vector<Slice> active_;
  BwdLengths lengths_;
  BwdTiling tiling_;
  int64_t start_ = 0;
  size_t next_ = 0;
};

bool is_full(const Slice& s) {
  return s.k_start - (s.q_end - 1) >= s.d_lo && s.k_end - 1 - s.q_start <= s.d_hi;
}

// Neighbouring rows that all see the same keys become one slice, for example the branches of a
// prefix tree in the tiles of their trunk. Each branch alone would fill its last query tile badly.
std::vector<Slice> joined(const std::vector<Slice>& cuts) {
  std::vector<Slice> out;
  for (const Slice& s : cuts) {
    if (!out.empty()) {
      Slice& last = out.back();
      if (last.q_end == s.q_start && last.k_start == s.k_start && last.k_end == s.k_end &&
          is_full(last) && is_full(s)) {
        last.q_end = s.q_end;
        last.d_lo = last.k_start - (last.q_end - 1);
        last.d_hi = last.k_end - 1 - last.q_start;
        continue;
      }
    }
    out.push_back(s);
  }
  return out;
}

// Number of the slice's query tiles with a masked cell: all but those whose rows have every key of
// the tile inside the band.
int64_t count_partial(const Slice& s, Range tile, int64_t tile_q) {
  const int64_t tiles = ceil_div(s.q_end - s.q_start, tile_q);
  if (s.k_start != tile.start || s.k_end != tile.end) return tiles;
  const int64_t lowest = std::max(s.q_start, tile.end - 1 - s.d_hi);
  const int64_t highest = std::min(s.q_end, tile.start - s.d_lo + 1) - tile_q;
  if (highest < lowest) return tiles;
  const int64_t first = ceil_div(lowest - s.q_start, tile_q);
  const int64_t last = (highest - s.q_start) / tile_q;
  return tiles - std::max<int64_t>(last - first + 1, 0);
}

void add_item(BwdWorkList& list, Range tile, const std::vector<Slice>& cuts, int64_t tile_q) {
  BwdItem item;
  item.tile = static_cast<int32_t>(list.num_tiles++);
  item.k_start = static_cast<int32_t>(tile.start);
  item.k_rows = static_cast<int32_t>(tile.size());
  item.entry_begin = static_cast<int32_t>(list.entries.size());
  for (const Slice& s : joined(cuts)) {
    BwdEntry entry;
    entry.q_begin = static_cast<int32_t>(s.q_start);
    entry.q_end = static_cast<int32_t>(s.q_end);
    entry.k_lo = static_cast<int32_t>(s.k_start);
    entry.k_hi = static_cast<int32_t>(s.k_end);
    entry.d_lo = static_cast<int32_t>(s.d_lo);
    entry.d_hi = static_cast<int32_t>(s.d_hi);
    list.entries.push_back(entry);
    item.steps += static_cast<int32_t>(ceil_div(s.q_end - s.q_start, tile_q));
    list.partial_steps += count_partial(s, tile, tile_q);
  }
  item.entry_end = static_cast<int32_t>(list.entries.size());
  list.steps += item.steps;
  list.items.push_back(item);
}

}  // namespace

BwdWorkList build_bwd_work_list(std::span<const Slice> slices, const BwdLengths& lengths,
                                const BwdTiling& tiling, bool deterministic) {
  if (deterministic && tiling.tile_q != kBwdTileQ)
    throw std::invalid_argument("in deterministic mode tile_q must be " +
                                std::to_string(kBwdTileQ) + ", got " +
                                std::to_string(tiling.tile_q) + "; leave it out");
  std::vector<Slice> kept;
  for (const Slice& s : slices) {
    const Slice tight = tighten(s);
    if (tight.empty()) continue;
    check(tight, lengths);
    kept.push_back(tight);
  }
  BwdWorkList list;
  for (const Slice& s : kept) list.row_starts.push_back(s.q_start);
  const auto tiles = static_cast<size_t>(lengths.num_k / tiling.tile_k);
  list.items.reserve(tiles + kept.size());
  list.entries.reserve(tiles + kept.size());
  TileCutter cutter(kept, lengths, tiling);
  Range tile;
  std::vector<Slice> cuts;
  while (cutter.next(tile, cuts)) add_item(list, tile, cuts, tiling.tile_q);
  order_items(list, deterministic);
  if (deterministic) cut_row_groups(list, lengths.num_q);
  return list;
}

}  // namespace magi
