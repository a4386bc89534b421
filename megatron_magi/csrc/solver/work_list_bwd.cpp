#include "solver/work_list_bwd.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <queue>
#include <stdexcept>
#include <string>

namespace magi {
namespace {

// Loading a key tile and storing its gradients costs about half a step per head
// (estimate: 96 KiB against 8 heads x 64 KiB moved per step).
constexpr double kTileOverhead = 0.5;

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

void check(const Slice& s, int64_t num_q, int64_t num_k) {
  if (s.q_start >= 0 && s.q_end <= num_q && s.k_start >= 0 && s.k_end <= num_k) return;
  throw std::invalid_argument("a slice must lie in " + std::to_string(num_q) + " queries x " +
                              std::to_string(num_k) + " keys, got q [" + std::to_string(s.q_start) +
                              ", " + std::to_string(s.q_end) + ") k [" + std::to_string(s.k_start) +
                              ", " + std::to_string(s.k_end) + "); cut it first");
}

// Walks the keys from left to right and keeps the slices that may meet the current tile.
class TileCutter {
 public:
  TileCutter(std::vector<Slice> slices, int64_t num_k, const BwdTiling& tiling)
      : slices_(std::move(slices)), num_k_(num_k), tiling_(tiling) {
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
    if (start_ >= num_k_) return false;
    activate(std::min(start_ + tiling_.tile_k, num_k_));
    tile = choose();
    cuts = cut_all(tile);
    start_ = tile.end;
    return true;
  }

 private:
  void activate(int64_t limit) {
    std::erase_if(active_, [&](const Slice& s) { return s.k_end <= start_; });
    while (next_ < slices_.size() && slices_[next_].k_start < limit) {
      active_.push_back(slices_[next_++]);
    }
  }

  // Either a whole tile or one that ends at the last slice boundary inside it: the one that costs
  // less per key. Documents longer than a tile are cut at their ends, shorter ones share tiles.
  Range choose() const {
    const Range whole{start_, std::min(start_ + tiling_.tile_k, num_k_)};
    const auto above = std::upper_bound(bounds_.begin(), bounds_.end(), whole.end);
    if (above == bounds_.begin() || *(above - 1) <= start_ || *(above - 1) == whole.end) {
      return whole;
    }
    const Range shorter{start_, *(above - 1)};
    return cost_per_key(whole) < cost_per_key(shorter) ? whole : shorter;
  }

  double cost_per_key(Range tile) const {
    double cost = kTileOverhead;
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
  int64_t num_k_;
  BwdTiling tiling_;
  int64_t start_ = 0;
  size_t next_ = 0;
};

int64_t count_partial(const Slice& s, Range tile, int64_t tile_q) {
  int64_t partial = 0;
  for (int64_t q = s.q_start; q < s.q_end; q += tile_q) {
    const bool full = q + tile_q <= s.q_end && s.k_start == tile.start && s.k_end == tile.end &&
                      tile.start - (q + tile_q - 1) >= s.d_lo && tile.end - 1 - q <= s.d_hi;
    partial += !full;
  }
  return partial;
}

void add_item(BwdWorkList& list, Range tile, const std::vector<Slice>& cuts, int64_t tile_q) {
  BwdItem item;
  item.k_start = static_cast<int32_t>(tile.start);
  item.k_rows = static_cast<int32_t>(tile.size());
  item.entry_begin = static_cast<int32_t>(list.entries.size());
  for (const Slice& s : cuts) {
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

// Neighbouring key tiles run at the same time. If they share their last rows (causal), a descending
// walk starts them on the same rows: they then find them in the cache, and in deterministic mode
// nobody waits for a block that comes by much later. Called while items are in key order.
void choose_walk(BwdWorkList& list) {
  int64_t same_first = 0, same_last = 0, pairs = 0;
  for (size_t i = 1; i < list.items.size(); ++i) {
    const BwdItem &a = list.items[i - 1], &b = list.items[i];
    if (a.steps == 0 || b.steps == 0) continue;
    const auto first = [&](const BwdItem& x) { return list.entries[x.entry_begin].q_begin; };
    const auto last = [&](const BwdItem& x) { return list.entries[x.entry_end - 1].q_end; };
    same_first += first(a) == first(b);
    same_last += last(a) == last(b);
    ++pairs;
  }
  list.descending = same_last >= same_first;
  list.heads_inner = 2 * std::max(same_first, same_last) >= pairs;
}

// Rows cut into cells: from each of `starts` on, pieces of `tile_q` rows.
class CellGrid {
 public:
  CellGrid(std::vector<int64_t> starts, int64_t num_q, int64_t tile_q)
      : starts_(std::move(starts)) {
    starts_.push_back(0);
    std::sort(starts_.begin(), starts_.end());
    starts_.erase(std::unique(starts_.begin(), starts_.end()), starts_.end());
    tile_q_ = tile_q;
    for (size_t i = 0; i < starts_.size(); ++i) {
      first_.push_back(num_cells_);
      const int64_t end = i + 1 < starts_.size() ? starts_[i + 1] : std::max(num_q, starts_[i] + 1);
      num_cells_ += ceil_div(end - starts_[i], tile_q);
    }
  }

  int64_t cell(int64_t q) const {
    const auto above = std::upper_bound(starts_.begin(), starts_.end(), q);
    const size_t i = static_cast<size_t>(above - starts_.begin()) - 1;
    return first_[i] + (q - starts_[i]) / tile_q_;
  }
  int64_t num_cells() const { return num_cells_; }

 private:
  std::vector<int64_t> starts_;
  std::vector<int64_t> first_;  // cell of each start
  int64_t num_cells_ = 0;
  int64_t tile_q_ = 0;
};

// Calls f(entry index, first row, last row) for the steps of an item in walk order.
template <class F>
void walk(const BwdWorkList& list, const BwdItem& item, int64_t tile_q, F&& f) {
  const int32_t count = item.entry_end - item.entry_begin;
  for (int32_t i = 0; i < count; ++i) {
    const int32_t e = list.descending ? item.entry_end - 1 - i : item.entry_begin + i;
    const BwdEntry& entry = list.entries[e];
    const int64_t tiles = ceil_div(entry.q_end - entry.q_begin, tile_q);
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t q = entry.q_begin + (list.descending ? tiles - 1 - t : t) * tile_q;
      f(e, q, std::min<int64_t>(q + tile_q, entry.q_end) - 1);
    }
  }
}

bool fits(const BwdWorkList& list, const CellGrid& grid, int64_t tile_q) {
  bool two_at_most = true;
  for (const BwdItem& item : list.items) {
    walk(list, item, tile_q, [&](int32_t, int64_t first, int64_t last) {
      two_at_most = two_at_most && grid.cell(last) - grid.cell(first) <= 1;
    });
  }
  return two_at_most;
}

void number_visits(BwdWorkList& list, std::span<const Slice> slices, int64_t num_q,
                   int64_t tile_q) {
  // Slices start their own cells (documents do not start at multiples of 64); where they are so
  // short that a step would meet three cells, one grid for all.
  std::vector<int64_t> starts;
  for (const Slice& s : slices) starts.push_back(s.q_start);
  CellGrid grid(std::move(starts), num_q, tile_q);
  if (!fits(list, grid, tile_q)) grid = CellGrid({}, num_q, tile_q);
  list.num_cells = grid.num_cells();
  std::vector<int32_t> signals(static_cast<size_t>(list.num_cells), 0);
  std::vector<int32_t> touched(signals.size(), -1);  // last entry that waited at the cell
  std::vector<int64_t> pending;                      // cells to be signalled by the entry
  int32_t entry = -1;
  const auto flush = [&] {
    for (const int64_t cell : pending) ++signals[cell];
    pending.clear();
  };
  for (BwdItem& item : list.items) {
    item.visit_begin = static_cast<int32_t>(list.visits.size());
    walk(list, item, tile_q, [&](int32_t e, int64_t first, int64_t last) {
      if (e != entry) flush();
      entry = e;
      BwdVisit visit;
      visit.cell = static_cast<int32_t>(grid.cell(first));
      visit.num_cells = static_cast<int32_t>(grid.cell(last) - visit.cell + 1);
      for (int32_t i = 0; i < visit.num_cells; ++i) {
        const int64_t cell = visit.cell + i;
        if (touched[cell] != e) visit.wait[i] = signals[cell];
        touched[cell] = e;
        pending.push_back(cell);
      }
      list.visits.push_back(visit);
    });
  }
}

constexpr double kBlockOverhead = 3.;   // steps: start, keys, gradients
constexpr double kSplitOverhead = 1.5;  // steps: partial sums of a block, written and read again
constexpr double kTolerance = 1.02;
// An H200 has 50 MiB of L2. Measured at 16k packed causal: four heads together (64 MiB) ran 6 %
// slower than one, where the simulation alone promised 16 % less.
constexpr int64_t kCacheBytes = 36 << 20;
constexpr double kCachePenalty = 1.3;
// Blocks of different kv heads never wait for each other. Measured at 16k (129 items): one, two,
// four, eight heads together lose 25-40, 5-25, 0-9, 0-11 % against the fast mode.
constexpr int64_t kDeterministicBlocksPerSm = 3;
constexpr int64_t kMaxSplitBlocksPerSm = 8;  // with more blocks than this, splits do not pay

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

}  // namespace

BwdSchedule choose_bwd_schedule(const BwdWorkList& list, int64_t group, int64_t num_heads_kv,
                                int64_t num_sms, int64_t head_bytes, bool deterministic) {
  std::vector<BwdSchedule> choices;
  for (int64_t splits = 1; splits <= group; splits *= 2) {
    if (group % splits != 0) break;
    if (splits > 1 && static_cast<int64_t>(list.items.size()) * num_heads_kv * splits / 2 >
                          kMaxSplitBlocksPerSm * num_sms)
      break;
    for (int64_t heads = 1; heads <= num_heads_kv; ++heads) {
      if (num_heads_kv % heads != 0) continue;
      double makespan = simulate(list, group, num_heads_kv, num_sms, splits, heads);
      if (heads > 1 && heads * head_bytes > kCacheBytes) makespan *= kCachePenalty;
      choices.push_back({splits, heads, makespan});
    }
  }
  double best = choices.front().makespan;
  for (const BwdSchedule& c : choices) best = std::min(best, c.makespan);
  BwdSchedule chosen = *std::find_if(choices.begin(), choices.end(), [&](const BwdSchedule& c) {
    return c.makespan <= best * kTolerance;
  });
  if (deterministic) {
    const auto enough = [&](int64_t heads) {
      return heads * static_cast<int64_t>(list.items.size()) >= kDeterministicBlocksPerSm * num_sms;
    };
    int64_t heads = 1;
    while (heads < num_heads_kv && (num_heads_kv % heads != 0 || !enough(heads))) ++heads;
    chosen.heads_per_section = heads;
  }
  return chosen;
}

BwdWorkList build_bwd_work_list(std::span<const Slice> slices, int64_t num_q, int64_t num_k,
                                const BwdTiling& tiling, bool deterministic) {
  std::vector<Slice> kept;
  for (const Slice& s : slices) {
    const Slice tight = tighten(s);
    if (tight.empty()) continue;
    check(tight, num_q, num_k);
    kept.push_back(tight);
  }
  BwdWorkList list;
  TileCutter cutter(kept, num_k, tiling);
  Range tile;
  std::vector<Slice> cuts;
  while (cutter.next(tile, cuts)) add_item(list, tile, cuts, tiling.tile_q);
  choose_walk(list);
  std::stable_sort(list.items.begin(), list.items.end(),
                   [](const BwdItem& a, const BwdItem& b) { return a.steps > b.steps; });
  if (deterministic) number_visits(list, kept, num_q, tiling.tile_q);
  return list;
}

}  // namespace magi
