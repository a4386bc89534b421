#include "schedule/backward_order.h"

#include <algorithm>
#include <map>
#include <vector>

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
  bool uneven() const { return 10 * static_cast<int64_t>(most) > 13 * static_cast<int64_t>(least); }
};

class Groups {
 public:
  explicit Groups(const BwdWorkList& list) : list_(list) {
    for (const BwdItem& item : list.items) {
      if (item.steps == 0) continue;
      const Rows rows = rows_of(list, item);
      Group& group = groups_[key(item)];
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
  const Group& of(const BwdItem& item) const { return groups_.at(key(item)); }
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
  // How often neighbours in the list belong to different groups.
  int64_t changes() const {
    int64_t count = 0;
    for (size_t i = 1; i < list_.items.size(); ++i)
      count += key(list_.items[i]) != key(list_.items[i - 1]);
    return count;
  }

 private:
  template <class F>
  double average(F&& f) const {
    double sum = 0., steps = 0.;
    for (const auto& [_, group] : groups_) {
      sum += static_cast<double>(f(group)) * static_cast<double>(group.steps);
      steps += static_cast<double>(group.steps);
    }
    return steps > 0. ? sum / steps : 0.;
  }

  const BwdWorkList& list_;
  std::map<int32_t, Group> groups_;
};

// Sorts group by group, the group with the longest item first, and by length inside each group.
void sort_by_group(BwdWorkList& list, const Groups& groups) {
  std::stable_sort(list.items.begin(), list.items.end(), [&](const BwdItem& a, const BwdItem& b) {
    if ((a.steps == 0) != (b.steps == 0)) return b.steps == 0;
    if (a.steps == 0) return false;
    const int32_t x = groups.of(a).most, y = groups.of(b).most;
    if (x != y) return x > y;
    const int32_t u = groups.key(a), v = groups.key(b);
    return u != v ? u < v : a.steps > b.steps;
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
  if (deterministic) return;
  list.grouped =
      groups.size() > 1 && groups.changes() > 2 * groups.size() && groups.uneven_share() > 0.5;
  if (list.grouped) sort_by_group(list, groups);
  list.heads_inner = list.grouped;
}

}  // namespace magi
