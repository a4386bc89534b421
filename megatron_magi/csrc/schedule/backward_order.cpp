#include "schedule/backward_order.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "schedule/backward_costs.h"
#include "schedule/sorted_by_number.h"

namespace magi {
namespace {

struct Rows {
  int32_t first = 0, last = 0;
};

Rows rows_of(const BwdWorkList& list, const BwdItem& item) {
  if (item.entry_begin == item.entry_end) return {};
  return {list.entries[item.entry_begin].q_begin, list.entries[item.entry_end - 1].q_end};
}

// Neighbouring key tiles run at the same time. If they share their last rows (causal), a descending
// walk starts them on the same rows. They then find these rows in the cache, and in deterministic
// mode no block waits for one that reaches the rows much later.
void choose_walk(BwdWorkList& list) {
  int64_t same_first = 0, same_last = 0, pairs = 0;
  for (size_t i = 1; i < list.items.size(); ++i) {
    const BwdItem &a = list.items[i - 1], &b = list.items[i];
    if (a.steps == 0 || b.steps == 0) continue;
    const Rows x = rows_of(list, a), y = rows_of(list, b);
    same_first += x.first == y.first;
    same_last += x.last == y.last;
    ++pairs;
  }
  list.descending = same_last >= same_first;
  list.heads_inner = 2 * std::max(same_first, same_last) >= pairs;
}

// Items that start their walk on the same rows, like those of one document.
struct Group {
  int32_t most = 0, least = INT32_MAX;  // steps of an item
  int32_t first = INT32_MAX, last = 0;  // rows
  int64_t steps = 0;
  // Long and short items are together: they drift apart, and rows in between stay in use.
  bool uneven() const { return most > kBwdCosts.uneven_ratio * least; }
};

class Groups {
 public:
  explicit Groups(const BwdWorkList& list) : list_(list) {
    for (const BwdItem& item : list.items)
      if (item.steps != 0 && (keys_.empty() || keys_.back() != key(item)))
        keys_.push_back(key(item));
    std::ranges::sort(keys_);
    keys_.erase(std::unique(keys_.begin(), keys_.end()), keys_.end());
    groups_.resize(keys_.size());
    for (const BwdItem& item : list.items) {
      if (item.steps == 0) continue;
      const Rows rows = rows_of(list, item);
      Group& group = groups_[place_of(item)];
      group.most = std::max(group.most, item.steps);
      group.least = std::min(group.least, item.steps);
      group.first = std::min(group.first, rows.first);
      group.last = std::max(group.last, rows.last);
      group.steps += item.steps;
    }
  }

  int32_t key(const BwdItem& item) const {
    const Rows rows = rows_of(list_, item);
    return list_.descending ? rows.last : rows.first;
  }
  int64_t size() const { return static_cast<int64_t>(groups_.size()); }

  double uneven_rows() const {
    return average([](const Group& g) { return g.uneven() ? g.last - g.first : 0; });
  }
  double even_rows() const {
    return average([](const Group& g) { return g.uneven() ? 0 : g.last - g.first; });
  }
  double uneven_share() const {
    return average([](const Group& g) { return g.uneven() ? 1 : 0; });
  }
  double rows() const { return even_rows() + uneven_rows(); }
  // In how many groups a row lies, on average over the rows from the first group to the last.
  double overlap() const {
    double rows = 0.;
    int32_t first = INT32_MAX, last = 0;
    for (const Group& group : groups_) {
      rows += static_cast<double>(group.last - group.first);
      first = std::min(first, group.first);
      last = std::max(last, group.last);
    }
    return first < last ? rows / static_cast<double>(last - first) : 0.;
  }
  // How often neighbours in the list belong to different groups.
  int64_t changes() const {
    int64_t count = 0;
    for (size_t i = 1; i < list_.items.size(); ++i)
      count += key(list_.items[i]) != key(list_.items[i - 1]);
    return count;
  }

  // The number of an item's group.
  size_t place_of(const BwdItem& item) const {
    const int32_t of_item = key(item);
    if (keys_[last_] != of_item)  // mostly neighbours are of one group
      last_ = static_cast<size_t>(std::ranges::lower_bound(keys_, of_item) - keys_.begin());
    return last_;
  }
  // For every group, how many groups stand before it: those with a longer longest item.
  std::vector<int32_t> ranks() const {
    std::vector<size_t> order(groups_.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, std::greater(), [&](size_t g) { return groups_[g].most; });
    std::vector<int32_t> ranks(order.size());
    for (size_t i = 0; i < order.size(); ++i) ranks[order[i]] = static_cast<int32_t>(i);
    return ranks;
  }

 private:
  template <class F>
  double average(F&& f) const {
    double sum = 0., steps = 0.;
    for (const Group& group : groups_) {
      sum += static_cast<double>(f(group)) * static_cast<double>(group.steps);
      steps += static_cast<double>(group.steps);
    }
    return steps > 0. ? sum / steps : 0.;
  }

  const BwdWorkList& list_;
  std::vector<int32_t> keys_;  // of the groups, ascending
  std::vector<Group> groups_;
  mutable size_t last_ = 0;  // that was looked up
};

// How much the lengths of items differ: twice their standard deviation, over their mean.
double spread(const BwdWorkList& list) {
  double count = 0., sum = 0., squares = 0.;
  for (const BwdItem& item : list.items) {
    if (item.steps == 0) continue;
    const auto steps = static_cast<double>(item.steps);
    count += 1., sum += steps, squares += steps * steps;
  }
  return count > 0. ? 2. * std::sqrt(std::max(0., count * squares - sum * sum)) / sum : 0.;
}

// Sorts group by group, the group with the longest item first; items of a group stay in order.
// Items without steps come last.
void sort_by_group(BwdWorkList& list, const Groups& groups) {
  const std::vector<int32_t> ranks = groups.ranks();
  const auto last = static_cast<int32_t>(ranks.size());
  list.items = sorted_by_number(list.items, last, [&](const BwdItem& item) {
    return item.steps == 0 ? last : ranks[groups.place_of(item)];
  });
}

}  // namespace

void order_items(BwdWorkList& list, bool deterministic) {
  choose_walk(list);
  const Groups groups(list);
  std::stable_sort(list.items.begin(), list.items.end(),
                   [](const BwdItem& a, const BwdItem& b) { return a.steps > b.steps; });
  list.uneven_rows = groups.uneven_rows();
  list.even_rows = groups.even_rows();
  // Where groups share their rows, as those of scattered blocks do, neighbours of about one length
  // keep together wherever they start, and a group's own items drift apart. In deterministic mode
  // items of few groups wait less if they stand together.
  const bool uneven = groups.size() > 1 && groups.uneven_share() > kBwdCosts.uneven_share;
  const bool scattered = uneven && groups.overlap() > kBwdCosts.most_overlap;
  const double fewest = kBwdCosts.fewest_changes * static_cast<double>(groups.size());
  const bool mixed = static_cast<double>(groups.changes()) > fewest;
  list.grouped = uneven && !scattered && (deterministic || mixed);
  if (list.grouped) sort_by_group(list, groups);
  if (scattered && !deterministic) list.scattered_rows = groups.rows() * spread(list);
  list.heads_inner = list.grouped || (deterministic && list.heads_inner);
}

}  // namespace magi
