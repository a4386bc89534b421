#include "schedule/backward_turns.h"

#include <algorithm>
#include <map>
#include <vector>

#include "planner/ceil_div.h"
#include "schedule/number_set.h"

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

  explicit RowGroups(const BwdWorkList& list)
      : segments_(list.segments), num_row_groups_(list.num_row_groups) {}

  // Number of the segment of a row. `guess` is one that it is likely to be in.
  int32_t segment_of(int32_t q, int32_t guess) const {
    const auto at = static_cast<size_t>(guess);
    const bool is_last = at + 1 == segments_.size();
    if (segments_[at].q_begin <= q && (is_last || q < segments_[at + 1].q_begin)) return guess;
    const auto above = std::ranges::upper_bound(segments_, q, {}, &BwdSegment::q_begin);
    return static_cast<int32_t>(above - segments_.begin()) - 1;
  }
  // Number of the row group of a row of this segment.
  int32_t group_of(int32_t q, int32_t segment) const {
    const BwdSegment& in = segments_[static_cast<size_t>(segment)];
    return in.row_group + (q - in.q_begin) / kBwdTileQ;
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

// True if no step meets more than two row groups. Steps of entries that begin at the same row
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
  explicit LastAdded(int64_t num_row_groups)
      : begins_(num_row_groups), numbers_(static_cast<size_t>(num_row_groups) + 1) {
    begins_.add(0);
    begins_.add(num_row_groups);  // an end behind the last
  }

  // Lets the entry follow on row groups [first, last], and appends whom it follows to `turns`.
  void add(int32_t number, int32_t first, int32_t last, std::vector<BwdTurn>& turns) {
    cut(first);
    cut(last + 1);
    const size_t first_turn = turns.size();
    for (int64_t at = first; at <= last;) {
      const int64_t next = begins_.next(at);
      const int32_t after = numbers_[static_cast<size_t>(at)];
      const auto until = static_cast<int32_t>(next - 1);
      if (turns.size() > first_turn && turns.back().after == after)
        turns.back().last_row_group = until;
      else
        turns.push_back({until, after});
      if (at != first) begins_.remove(at);
      at = next;
    }
    numbers_[static_cast<size_t>(first)] = number;
  }

 private:
  void cut(int64_t row_group) {
    if (begins_.has(row_group)) return;
    numbers_[static_cast<size_t>(row_group)] =
        numbers_[static_cast<size_t>(begins_.previous(row_group))];
    begins_.add(row_group);
  }

  NumberSet begins_;
  std::vector<int32_t> numbers_;  // of the row groups in begins_
};

// Calls f(entry number) for the entries of an item in walk order.
template <class F>
void for_entries(const BwdWorkList& list, const BwdItem& item, F&& f) {
  const int32_t count = item.entry_end - item.entry_begin;
  for (int32_t i = 0; i < count; ++i)
    f(static_cast<size_t>(list.descending ? item.entry_end - 1 - i : item.entry_begin + i));
}

}  // namespace

void cut_row_groups(BwdWorkList& list, int64_t num_q) {
  // Each slice starts a segment, because documents do not start at multiples of 64. If slices are
  // so short that a step would meet three row groups, all share one grid.
  RowGroups groups(list.row_starts, num_q);
  if (!fits(list, groups)) groups = RowGroups(std::vector<int64_t>{}, num_q);
  list.num_row_groups = groups.num_row_groups();
  list.segments = groups.segments();
}

void number_turns(BwdWorkList& list) {
  const RowGroups groups(list);
  list.places.resize(list.entries.size());
  list.turns.reserve(list.entries.size());  // most entries follow on one other
  LastAdded last_added(groups.num_row_groups());
  int32_t segment = 0;
  for (const BwdItem& item : list.items) {
    for_entries(list, item, [&](size_t e) {
      const BwdEntry& entry = list.entries[e];
      BwdPlace& place = list.places[e];
      segment = groups.segment_of(entry.q_begin, segment);
      const int32_t last = groups.segment_of(entry.q_end - 1, segment);
      place.segment_begin = segment;
      place.segment_end = last + 1;
      place.turn_begin = static_cast<int32_t>(list.turns.size());
      last_added.add(static_cast<int32_t>(e) + 1, groups.group_of(entry.q_begin, segment),
                     groups.group_of(entry.q_end - 1, last), list.turns);
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
