#include "schedule/backward_bands.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "planner/ceil_div.h"

namespace magi {
namespace {

// The query tile of an entry that begins at this row or behind it.
int32_t tile_from(const BwdEntry& entry, int64_t row, int64_t tile_q) {
  const int64_t tiles = ceil_div(std::max<int64_t>(row - entry.q_begin, 0), tile_q);
  return static_cast<int32_t>(std::min<int64_t>(entry.q_begin + tiles * tile_q, entry.q_end));
}

// What an item has of the query tiles that begin in the rows [begin, end).
BwdItem band_of(const BwdItem& item, const std::vector<BwdEntry>& from, Range rows, int64_t tile_q,
                std::vector<BwdEntry>& to) {
  BwdItem band = item;
  band.entry_begin = static_cast<int32_t>(to.size());
  band.steps = 0;
  for (int32_t e = item.entry_begin; e < item.entry_end; ++e) {
    BwdEntry entry = from[static_cast<size_t>(e)];
    const int32_t begin = tile_from(entry, rows.start, tile_q);
    entry.q_end = tile_from(entry, rows.end, tile_q);
    entry.q_begin = begin;
    if (entry.q_begin >= entry.q_end) continue;
    band.steps += static_cast<int32_t>(ceil_div(entry.q_end - entry.q_begin, tile_q));
    to.push_back(entry);
  }
  band.entry_end = static_cast<int32_t>(to.size());
  return band;
}

// The rows from an item's first one to its last one.
Range rows_of(const BwdItem& item, const std::vector<BwdEntry>& entries) {
  if (item.entry_begin == item.entry_end) return {0, 0};
  int64_t last = 0;
  for (int32_t e = item.entry_begin; e < item.entry_end; ++e)
    last = std::max<int64_t>(last, entries[static_cast<size_t>(e)].q_end);
  return {entries[static_cast<size_t>(item.entry_begin)].q_begin, last};
}

}  // namespace

int64_t rows_of_band(double rows, double row_bytes, double shared_bytes) {
  const double bands = std::ceil(rows * row_bytes / shared_bytes);
  if (bands <= 1.) return 0;
  return ceil_div(static_cast<int64_t>(std::ceil(rows / bands)), int64_t{kBwdTileQ}) * kBwdTileQ;
}

void cut_into_bands(BwdWorkList& list, int64_t band_rows, int64_t tile_q) {
  const std::vector<BwdItem> items = std::exchange(list.items, {});
  const std::vector<BwdEntry> entries = std::exchange(list.entries, {});
  bool more = true;
  for (int32_t band = 0; more; ++band) {
    more = false;
    for (BwdItem item : items) {
      const Range rows = rows_of(item, entries);
      item.num_bands = static_cast<int32_t>(std::max<int64_t>(1, ceil_div(rows.size(), band_rows)));
      if (band >= item.num_bands) continue;
      more |= band + 1 < item.num_bands;
      item.band = band;
      const int64_t begin = rows.start + band * band_rows;
      list.items.push_back(
          band_of(item, entries, {begin, begin + band_rows}, tile_q, list.entries));
    }
  }
}

}  // namespace magi
