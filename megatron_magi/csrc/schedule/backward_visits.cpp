#include "schedule/backward_visits.h"

#include <algorithm>
#include <vector>

#include "planner/ceil_div.h"

namespace magi {
namespace {

// Query rows cut into row groups: from each of `starts` on, pieces of `tile_q` rows.
class RowGroups {
 public:
  RowGroups(std::vector<int64_t> starts, int64_t num_q, int64_t tile_q)
      : starts_(std::move(starts)) {
    starts_.push_back(0);
    std::sort(starts_.begin(), starts_.end());
    starts_.erase(std::unique(starts_.begin(), starts_.end()), starts_.end());
    tile_q_ = tile_q;
    for (size_t i = 0; i < starts_.size(); ++i) {
      first_.push_back(num_row_groups_);
      const int64_t end = i + 1 < starts_.size() ? starts_[i + 1] : std::max(num_q, starts_[i] + 1);
      num_row_groups_ += ceil_div(end - starts_[i], tile_q);
    }
  }

  int64_t group_of(int64_t q) const {
    const auto above = std::upper_bound(starts_.begin(), starts_.end(), q);
    const size_t i = static_cast<size_t>(above - starts_.begin()) - 1;
    return first_[i] + (q - starts_[i]) / tile_q_;
  }
  int64_t num_row_groups() const { return num_row_groups_; }

 private:
  std::vector<int64_t> starts_;
  std::vector<int64_t> first_;  // row group of each start
  int64_t num_row_groups_ = 0;
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

bool fits(const BwdWorkList& list, const RowGroups& groups, int64_t tile_q) {
  bool two_at_most = true;
  for (const BwdItem& item : list.items) {
    walk(list, item, tile_q, [&](int32_t, int64_t first, int64_t last) {
      two_at_most = two_at_most && groups.group_of(last) - groups.group_of(first) <= 1;
    });
  }
  return two_at_most;
}

}  // namespace

void number_visits(BwdWorkList& list, int64_t num_q, int64_t tile_q) {
  // Each slice starts a row group, because documents do not start at multiples of 64. If slices are
  // so short that a step would meet three row groups, all share one grid.
  RowGroups groups(list.row_starts, num_q, tile_q);
  if (!fits(list, groups, tile_q)) groups = RowGroups({}, num_q, tile_q);
  list.num_row_groups = groups.num_row_groups();
  std::vector<int32_t> signals(static_cast<size_t>(list.num_row_groups), 0);
  std::vector<int32_t> touched(signals.size(), -1);  // last entry that waited at the row group
  std::vector<int64_t> pending;                      // row groups that the entry will signal
  int32_t entry = -1;
  const auto flush = [&] {
    for (const int64_t group : pending) ++signals[group];
    pending.clear();
  };
  for (BwdItem& item : list.items) {
    item.visit_begin = static_cast<int32_t>(list.visits.size());
    walk(list, item, tile_q, [&](int32_t e, int64_t first, int64_t last) {
      if (e != entry) flush();
      entry = e;
      BwdVisit visit;
      visit.row_group = static_cast<int32_t>(groups.group_of(first));
      visit.num_row_groups = static_cast<int32_t>(groups.group_of(last) - visit.row_group + 1);
      for (int32_t i = 0; i < visit.num_row_groups; ++i) {
        const int64_t group = visit.row_group + i;
        int32_t& wait = i == 0 ? visit.wait_first : visit.wait_second;
        if (touched[group] != e) wait = signals[group];
        touched[group] = e;
        pending.push_back(group);
      }
      list.visits.push_back(visit);
    });
  }
}

}  // namespace magi
