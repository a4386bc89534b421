#include "schedule/forward.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "planner/ceil_div.h"
#include "schedule/sorted_by_number.h"

namespace magi {
namespace {

// These bound the host's time and are no costs: how many tiles behind a possible end of a tile are
// compared, and how many possible ends.
constexpr int64_t kHorizon = 16;
constexpr int kMaxOptions = 6;

// Rows [begin, end) that the same slices cover.
struct Strip {
  int64_t begin = 0;
  int64_t end = 0;
  std::vector<int32_t> covering;  // indices of slices, by first key
};

std::vector<Strip> cut_strips(std::span<const Slice> slices, int64_t num_q) {
  std::vector<int64_t> bounds = {0, num_q};
  for (const Slice& s : slices) {
    bounds.push_back(s.q_start);
    bounds.push_back(s.q_end);
  }
  std::sort(bounds.begin(), bounds.end());
  bounds.erase(std::unique(bounds.begin(), bounds.end()), bounds.end());

  std::vector<int32_t> by_start(slices.size());
  for (size_t i = 0; i < slices.size(); ++i) by_start[i] = static_cast<int32_t>(i);
  std::stable_sort(by_start.begin(), by_start.end(),
                   [&](int32_t a, int32_t b) { return slices[a].q_start < slices[b].q_start; });

  std::vector<Strip> strips;
  std::vector<int32_t> active;
  size_t next = 0;
  for (size_t i = 0; i + 1 < bounds.size(); ++i) {
    Strip strip{bounds[i], bounds[i + 1], {}};
    std::erase_if(active, [&](int32_t s) { return slices[s].q_end <= strip.begin; });
    for (; next < by_start.size() && slices[by_start[next]].q_start == strip.begin; ++next) {
      const auto at = std::upper_bound(
          active.begin(), active.end(), by_start[next],
          [&](int32_t a, int32_t b) { return slices[a].k_start < slices[b].k_start; });
      active.insert(at, by_start[next]);
    }
    strip.covering = active;
    strips.push_back(std::move(strip));
  }
  return strips;
}

// Sorts tiles by steps, the most first; equal ones stay in order.
void longest_first(std::vector<FwdTile>& tiles) {
  int32_t most = 0;
  for (const FwdTile& tile : tiles) most = std::max(most, tile.num_steps);
  tiles = sorted_by_number(tiles, most, [&](const FwdTile& tile) { return most - tile.num_steps; });
}

class Builder {
 public:
  Builder(std::span<const Slice> slices, int64_t num_q, const FwdTiling& tiling,
          const FwdCosts& costs)
      : slices_(slices), tiling_(tiling), costs_(costs), strips_(cut_strips(slices, num_q)) {}

  FwdWorkList run() {
    // About a tile and an entry for every piece of a strip: growing step by step would touch twice
    // the memory, which is most of the time of a long list.
    const int64_t rows = strips_.empty() ? 0 : strips_.back().end;
    const size_t pieces = static_cast<size_t>(rows / tiling_.tile_q) + strips_.size();
    list_.tiles.reserve(pieces);
    list_.entries.reserve(pieces);
    for (size_t i = 0; i < strips_.size();) {
      const Strip& strip = strips_[i];
      if (strip.covering.empty()) {
        add_empty(strip.begin, strip.end);
        ++i;
        continue;
      }
      int64_t at = std::max(strip.begin, done_);
      while (at < strip.end) {
        const int64_t end = choose_end(i, at);
        emit(i, at, end);
        at = end;
      }
      done_ = at;
      while (i < strips_.size() && strips_[i].end <= done_) ++i;
    }
    longest_first(list_.tiles);
    list_.active_keys = count_active_keys();
    return std::move(list_);
  }

 private:
  // Fills the entry of the part of a slice that rows [begin, end) meet; false if they meet none. It
  // is filled in place, because a copy would wait until its last words are stored.
  bool fill(FwdEntry& entry, const Slice& s, int64_t begin, int64_t end) const {
    entry = {};
    const int64_t first = std::max(begin, s.q_start), last = std::min(end, s.q_end) - 1;
    if (first > last) return false;
    const int64_t lo = std::max(s.k_start, first + s.d_lo);
    const int64_t hi = std::min(s.k_end, last + s.d_hi + 1);
    if (lo >= hi) return false;
    entry.k_begin = static_cast<int32_t>(lo);
    entry.num_tiles = static_cast<int32_t>(ceil_div(hi - lo, tiling_.tile_k));
    const auto narrow = [](int64_t x) { return static_cast<int32_t>(x); };
    entry.band = {narrow(s.q_start), narrow(s.q_end), narrow(s.k_start),
                  narrow(s.k_end),   narrow(s.d_lo),  narrow(s.d_hi)};
    if (s.q_start <= begin && end <= s.q_end) {
      const int64_t lo_all = std::max(s.k_start, last + s.d_lo);
      const int64_t hi_all = std::min(s.k_end, first + s.d_hi + 1);
      const int64_t full_begin = ceil_div(std::max<int64_t>(lo_all - lo, 0), tiling_.tile_k);
      const int64_t full_end = hi_all > lo ? (hi_all - lo) / tiling_.tile_k : 0;
      if (full_begin < full_end) {
        entry.full_begin = static_cast<int32_t>(full_begin);
        entry.full_end = static_cast<int32_t>(full_end);
      }
    }
    return true;
  }

  // Joins two slices that every row of the tile meets into one band, if the second begins at the
  // key where the first ends. Masks that a planner has cut along keys have many such slices.
  bool join(FwdEntry& first, const FwdEntry& second, int64_t begin, int64_t end) const {
    const Band &a = first.band, &b = second.band;
    const bool all_rows =
        a.q_start <= begin && end <= a.q_end && b.q_start <= begin && end <= b.q_end;
    if (!all_rows || a.k_end != b.k_start) return false;
    if (begin + a.d_hi + 1 < a.k_end || end - 1 + b.d_lo > b.k_start) return false;
    if (end - 1 + a.d_lo > a.k_end || begin + b.d_hi + 1 < b.k_start) return false;
    Slice whole;
    whole.q_start = begin;
    whole.q_end = end;
    whole.k_start = a.k_start;
    whole.k_end = b.k_end;
    whole.d_lo = a.d_lo;
    whole.d_hi = b.d_hi;
    return fill(first, whole, begin, end);
  }

  // Appends the entries of the tile [begin, end) that starts in strip i.
  void collect(size_t i, int64_t begin, int64_t end, std::vector<FwdEntry>& entries) const {
    const size_t before = entries.size();
    for (size_t j = i; j < strips_.size() && strips_[j].begin < end; ++j) {
      if (strips_[j].end <= begin) continue;
      for (const int32_t s : strips_[j].covering) {
        // A slice that begins earlier also covers the strip before, and was met there.
        if (strips_[j].begin > begin && slices_[s].q_start < strips_[j].begin) continue;
        FwdEntry& entry = entries.emplace_back();
        const bool more = fill(entry, slices_[s], begin, end);
        const bool joined =
            more && entries.size() > before + 1 && join(*(&entry - 1), entry, begin, end);
        if (!more || joined) entries.pop_back();
      }
    }
  }

  double cost(size_t i, int64_t begin, int64_t end) {
    scratch_.clear();
    collect(i, begin, end, scratch_);
    double total = costs_.end_tile_cost;
    for (const FwdEntry& e : scratch_)
      total += e.num_tiles + costs_.end_masked_cost * (e.num_tiles - (e.full_end - e.full_begin));
    return total;
  }

  // Cost of rows [begin, end) tiled strip by strip, without joining. Of a last tile that reaches
  // beyond `end`, its share of rows counts.
  double plain_cost(size_t i, int64_t begin, int64_t end) {
    double total = 0;
    for (; begin < end; ++i) {
      if (strips_[i].end <= begin) continue;
      if (strips_[i].covering.empty()) {
        begin = strips_[i].end;
        continue;
      }
      while (begin < std::min(end, strips_[i].end)) {
        const int64_t next = std::min(begin + tiling_.tile_q, strips_[i].end);
        const double tile = cost(i, begin, next);
        total += next <= end
                     ? tile
                     : tile * static_cast<double>(end - begin) / static_cast<double>(next - begin);
        begin = next;
      }
    }
    return total;
  }

  // Where a tile that reaches beyond its strip may end, and the last strip that it may reach.
  struct Ends {
    std::vector<int64_t> options;
    size_t last_strip = 0;
  };
  Ends ends_of(size_t i, int64_t limit) const {
    Ends ends{{strips_[i].end}, i};
    for (size_t j = i + 1; j < strips_.size() && strips_[j].begin < limit; ++j) {
      if (strips_[j].covering.empty()) break;  // never waste rows on a gap
      ends.options.push_back(std::min(strips_[j].end, limit));
      ends.last_strip = j;
    }
    if (ends.options.size() > kMaxOptions) {
      const int64_t last = ends.options.back();
      ends.options.resize(kMaxOptions - 1);
      ends.options.push_back(last);
    }
    return ends;
  }

  // Chooses the end of the tile that starts at `begin` in strip i.
  int64_t choose_end(size_t i, int64_t begin) {
    const int64_t limit = begin + tiling_.tile_q;
    if (strips_[i].end >= limit) return limit;
    const auto [options, last_strip] = ends_of(i, limit);
    if (options.size() == 1) return options.front();
    // All options are compared up to here. Further on, tiles differ little between them, but for
    // the last one of the strip.
    const int64_t horizon = std::min(strips_[last_strip].end, limit + kHorizon * tiling_.tile_q);
    int64_t best = limit;
    double best_cost = std::numeric_limits<double>::infinity();
    for (const int64_t option : options) {
      const double option_cost = cost(i, begin, option) + plain_cost(i, option, horizon) +
                                 waste_beyond(last_strip, option, horizon);
      if (option_cost < best_cost) {
        best_cost = option_cost;
        best = option;
      }
    }
    return best;
  }

  // What the last tile of strip i costs for the rows that it has room for and has not, if the strip
  // is tiled from row `begin` on, or from its own start, and ends beyond the horizon.
  double waste_beyond(size_t i, int64_t begin, int64_t horizon) {
    const Strip& strip = strips_[i];
    const int64_t rows = (strip.end - std::max(begin, strip.begin)) % tiling_.tile_q;
    if (strip.end == horizon || rows == 0) return 0.;
    const double unused = 1. - static_cast<double>(rows) / static_cast<double>(tiling_.tile_q);
    return cost(i, strip.end - rows, strip.end) * unused;
  }

  void emit(size_t i, int64_t begin, int64_t end) {
    const size_t before = list_.entries.size();
    collect(i, begin, end, list_.entries);
    if (list_.entries.size() == before) {
      add_empty(begin, end);
      return;
    }
    FwdTile tile;
    tile.q_start = tile.out_start = static_cast<int32_t>(begin);
    tile.num_tokens = static_cast<int32_t>(end - begin);
    tile.entry_begin = static_cast<int32_t>(before);
    tile.num_entries = static_cast<int32_t>(list_.entries.size() - before);
    for (size_t e = before; e < list_.entries.size(); ++e) {
      const FwdEntry& entry = list_.entries[e];
      tile.num_steps += entry.num_tiles;
      list_.masked_steps += entry.num_tiles - (entry.full_end - entry.full_begin);
    }
    list_.steps += tile.num_steps;
    list_.tiles.push_back(tile);
  }

  void add_empty(int64_t begin, int64_t end) {
    std::vector<int32_t>& rows = list_.empty_rows;
    if (!rows.empty() && rows.back() == begin) {
      rows.back() = static_cast<int32_t>(end);
      return;
    }
    rows.push_back(static_cast<int32_t>(begin));
    rows.push_back(static_cast<int32_t>(end));
  }

  int64_t count_active_keys() const {
    std::vector<Range> ranges;
    for (const Slice& s : slices_) ranges.push_back({s.k_start, s.k_end});
    std::sort(ranges.begin(), ranges.end(),
              [](const Range& a, const Range& b) { return a.start < b.start; });
    int64_t total = 0, end = 0;
    for (const Range& r : ranges) {
      total += std::max<int64_t>(0, r.end - std::max(r.start, end));
      end = std::max(end, r.end);
    }
    return total;
  }

  std::span<const Slice> slices_;
  const FwdTiling& tiling_;
  const FwdCosts& costs_;
  std::vector<Strip> strips_;
  std::vector<FwdEntry> scratch_;
  int64_t done_ = 0;  // rows before this one are already in tiles
  FwdWorkList list_;
};

// Appends key tiles [begin, end) of the tile's walk as entries.
void cut_walk(const FwdWorkList& list, const FwdTile& tile, int32_t begin, int32_t end,
              int32_t tile_k, std::vector<FwdEntry>& out) {
  int32_t at = 0;  // steps before the entry
  for (int32_t i = 0; i < tile.num_entries; ++i) {
    FwdEntry entry = list.entries[tile.entry_begin + i];
    const int32_t first = std::max(begin - at, 0);
    const int32_t last = std::min(end - at, entry.num_tiles);
    at += entry.num_tiles;
    if (first >= last) continue;
    entry.k_begin += first * tile_k;
    entry.num_tiles = last - first;
    entry.full_begin = std::clamp(entry.full_begin - first, 0, entry.num_tiles);
    entry.full_end = std::clamp(entry.full_end - first, 0, entry.num_tiles);
    out.push_back(entry);
  }
}

// The rows of `num_parts` outputs of num_q rows that no tile writes, as pairs.
std::vector<int32_t> unwritten_rows(const FwdWorkList& list, int64_t num_q) {
  std::vector<Range> written;
  for (const FwdTile& t : list.tiles) written.push_back({t.out_start, t.out_start + t.num_tokens});
  std::sort(written.begin(), written.end(),
            [](const Range& a, const Range& b) { return a.start < b.start; });
  written.push_back({list.num_parts * num_q, list.num_parts * num_q});
  std::vector<int32_t> rows;
  int64_t at = 0;
  for (const Range& r : written) {
    if (at < r.start) {
      rows.push_back(static_cast<int32_t>(at));
      rows.push_back(static_cast<int32_t>(r.start));
    }
    at = r.end;
  }
  return rows;
}

}  // namespace

FwdWorkList build_fwd_work_list(std::span<const Slice> slices, int64_t num_q, int64_t num_k,
                                const FwdTiling& tiling, const FwdCosts& costs) {
  std::vector<Slice> tight;
  for (const Slice& s : slices) {
    if (s.q_start < 0 || s.k_start < 0 || s.q_end > num_q || s.k_end > num_k)
      throw std::invalid_argument(
          "slices must lie inside " + std::to_string(num_q) + " queries x " +
          std::to_string(num_k) + " keys, got rows [" + std::to_string(s.q_start) + ", " +
          std::to_string(s.q_end) + ") and keys [" + std::to_string(s.k_start) + ", " +
          std::to_string(s.k_end) + "); check the lengths the mask was built for");
    const Slice t = tighten(s);
    if (!t.empty()) tight.push_back(t);
  }
  if (tiling.tile_q <= 0 || tiling.tile_k <= 0)
    throw std::invalid_argument("tile_q and tile_k must be positive");
  if (num_q == 0) return {};
  return Builder(tight, num_q, tiling, costs).run();
}

void split_long_walks(FwdWorkList& list, int64_t num_q, int64_t tile_k, int64_t max_steps) {
  if (max_steps <= 0) throw std::invalid_argument("max_steps must be positive");
  FwdWorkList split = list;
  split.tiles.clear();
  split.entries.clear();
  split.masked_steps = 0;
  for (const FwdTile& tile : list.tiles) {
    const int64_t parts = ceil_div(tile.num_steps, max_steps);
    split.num_parts = std::max(split.num_parts, parts);
    for (int64_t part = 0; part < parts; ++part) {
      FwdTile cut = tile;
      const auto begin = static_cast<int32_t>(part * tile.num_steps / parts);
      const auto end = static_cast<int32_t>((part + 1) * tile.num_steps / parts);
      cut.entry_begin = static_cast<int32_t>(split.entries.size());
      cut_walk(list, tile, begin, end, static_cast<int32_t>(tile_k), split.entries);
      cut.num_entries = static_cast<int32_t>(split.entries.size()) - cut.entry_begin;
      cut.num_steps = end - begin;
      cut.out_start = static_cast<int32_t>(part * num_q + tile.q_start);
      split.tiles.push_back(cut);
    }
  }
  for (const FwdEntry& e : split.entries)
    split.masked_steps += e.num_tiles - (e.full_end - e.full_begin);
  longest_first(split.tiles);
  split.empty_rows = unwritten_rows(split, num_q);
  list = std::move(split);
}

}  // namespace magi
