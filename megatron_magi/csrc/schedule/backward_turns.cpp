#include "schedule/backward_turns.h"

#include <algorithm>
#include <map>
#include <vector>

#include "planner/ceil_div.h"

namespace magi {
namespace {

// Query rows cut into row groups: from each start of a segment on, pieces of `kBwdTileQ` rows.
class RowGroups {
 public:
  RowGroups(std::vector<int64_t> starts, int64_t num_q) {
    starts.push_back(0);
    std::ranges::sort(starts);
    starts.erase(std::unique(starts.begin(), starts.end()), starts.end());
    for (size_t i = 0; i < starts.size(); ++i) {
      segments_.push_back({static_cast<int32_t>(starts[i]), static_cast<int32_t>(num_row_groups_)});
      const int64_t end = i + 1 < starts.size() ? starts[i + 1] : std::max(num_q, starts[i] + 1);
      num_row_groups_ += ceil_div(end - starts[i], kBwdTileQ);
    }
  }

  // Number of the segment of a row.
  int32_t segment_of(int32_t q) const {
    const auto above = std::ranges::upper_bound(segments_, q, {}, &BwdSegment::q_begin);
    return static_cast<int32_t>(above - segments_.begin()) - 1;
  }
  int32_t group_of(int32_t q) const {
    const BwdSegment& segment = segments_[static_cast<size_t>(segment_of(q))];
    return segment.row_group + (q - segment.q_begin) / kBwdTileQ;
  }
  // Row groups that end with a segment and are so short that a step may meet both neighbours.
  std::vector<Range> short_groups() const {
    std::vector<Range> found;
    for (size_t i = 0; i + 1 < segments_.size(); ++i) {
      const int64_t begin = segments_[i].q_begin, end = segments_[i + 1].q_begin;
      const int64_t last = begin + (end - begin - 1) / kBwdTileQ * kBwdTileQ;
      if (end - last < kBwdTileQ - 1) found.push_back({last, end});
    }
    return found;
  }
  const std::vector<BwdSegment>& segments() const { return segments_; }
  int64_t num_row_groups() const { return num_row_groups_; }

 private:
  std::vector<BwdSegment> segments_;
  int64_t num_row_groups_ = 0;
};

// Whether no step meets more than two row groups. Steps of entries that begin at the same row
// modulo kBwdTileQ have the same grid, which meets some of the short groups with both neighbours.
bool fits(const BwdWorkList& list, const RowGroups& groups) {
  const std::vector<Range> short_groups = groups.short_groups();
  std::map<int32_t, std::vector<Range>> met;
  for (const BwdEntry& entry : list.entries) {
    const int32_t offset = entry.q_begin % kBwdTileQ;
    const auto [place, is_new] = met.try_emplace(offset);
    if (is_new)
      for (const Range& group : short_groups)
        if (group.start > offset &&
            (group.start - 1 - offset) / kBwdTileQ == (group.end - offset) / kBwdTileQ)
          place->second.push_back(group);
    const auto first =
        std::ranges::upper_bound(place->second, int64_t{entry.q_begin}, {}, &Range::start);
    if (first != place->second.end() && first->end < entry.q_end) return false;
  }
  return true;
}

// Who added last to each row group: a number that holds from its row group up to the next one's.
class LastAdded {
 public:
  // Lets the entry follow on row groups [first, last], and appends whom it follows to `turns`.
  void add(int32_t number, int32_t first, int32_t last, std::vector<BwdTurn>& turns) {
    const auto begin = cut(first), end = cut(last + 1);
    const size_t first_turn = turns.size();
    for (auto it = begin; it != end; ++it) {
      const int32_t until = std::next(it)->first - 1;
      if (turns.size() > first_turn && turns.back().after == it->second)
        turns.back().last_row_group = until;
      else
        turns.push_back({until, it->second});
    }
    begin->second = number;
    numbers_.erase(std::next(begin), end);
  }

 private:
  using Map = std::map<int32_t, int32_t>;

  Map::iterator cut(int32_t row_group) {
    const auto above = numbers_.upper_bound(row_group);
    const auto at = std::prev(above);
    return at->first == row_group ? at : numbers_.emplace_hint(above, row_group, at->second);
  }

  Map numbers_{{0, 0}};
};

RowGroups choose_groups(const BwdWorkList& list, std::span<const Slice> slices, int64_t num_q) {
  // Each slice starts a segment, because documents do not start at multiples of 64. If slices are
  // so short that a step would meet three row groups, all share one grid.
  std::vector<int64_t> starts;
  for (const Slice& s : slices) starts.push_back(s.q_start);
  RowGroups groups(std::move(starts), num_q);
  return fits(list, groups) ? groups : RowGroups({}, num_q);
}

// Calls f(entry number) for the entries of an item in walk order.
template <class F>
void for_entries(const BwdWorkList& list, const BwdItem& item, F&& f) {
  const int32_t count = item.entry_end - item.entry_begin;
  for (int32_t i = 0; i < count; ++i)
    f(static_cast<size_t>(list.descending ? item.entry_end - 1 - i : item.entry_begin + i));
}

}  // namespace

void number_turns(BwdWorkList& list, std::span<const Slice> slices, int64_t num_q) {
  const RowGroups groups = choose_groups(list, slices, num_q);
  list.num_row_groups = groups.num_row_groups();
  list.segments = groups.segments();
  list.places.resize(list.entries.size());
  LastAdded last_added;
  for (const BwdItem& item : list.items) {
    for_entries(list, item, [&](size_t e) {
      const BwdEntry& entry = list.entries[e];
      BwdPlace& place = list.places[e];
      place.segment_begin = groups.segment_of(entry.q_begin);
      place.segment_end = groups.segment_of(entry.q_end - 1) + 1;
      place.turn_begin = static_cast<int32_t>(list.turns.size());
      last_added.add(static_cast<int32_t>(e) + 1, groups.group_of(entry.q_begin),
                     groups.group_of(entry.q_end - 1), list.turns);
      place.turn_end = static_cast<int32_t>(list.turns.size());
    });
  }
}

std::vector<BwdVisit> visits_of(const BwdWorkList& list) {
  const BwdTurnLists lists{list.places.data(), list.turns.data(), list.segments.data()};
  std::vector<BwdVisit> visits;
  for (const BwdItem& item : list.items) {
    for_entries(list, item, [&](size_t e) {
      const BwdEntry& entry = list.entries[e];
      const int64_t tiles = ceil_div(entry.q_end - entry.q_begin, kBwdTileQ);
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t tile = list.descending ? tiles - 1 - t : t;
        visits.push_back(lists.visit(static_cast<int>(e), entry,
                                     entry.q_begin + static_cast<int32_t>(tile) * kBwdTileQ,
                                     list.descending));
      }
    });
  }
  return visits;
}

}  // namespace magi
