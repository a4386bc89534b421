// Waits and signals of a step of the deterministic backward, once for host and device.
#pragma once
#include "../work_lists.h"

namespace magi {

// The row groups that a step adds dQ to: one or two, because groups are as long as a step, and the
// host makes none in between shorter.
struct alignas(16) BwdVisit {
  enum Flags : int32_t {
    kTwo = 1,         // also the row group after the first
    kEndsFirst = 2,   // no later step of the entry adds to the first row group
    kEndsSecond = 4,  // likewise the second
    kContinues = 8,   // an earlier step of the entry has added to one of them, which ends here,
                      // because no row group is longer than a step
    kAllFlags = 16,   // more than all of them
  };
  int32_t row_group = 0;
  int32_t after_first = 0;   // see BwdTurn; 0: need not wait
  int32_t after_second = 0;  // of the second row group; 0 if there is one only
  int32_t signal = 0;        // the entry's number plus one, times kAllFlags, plus flags
};

// Three lists of the host, see work_lists.h.
struct BwdTurnLists {
  const BwdPlace* places;  // one for every entry
  const BwdTurn* turns;
  const BwdSegment* segments;

  // The segment of a row, among those of the entry.
  MAGI_HOST_DEVICE BwdSegment segment_of(const BwdPlace& place, int q) const {
    int begin = place.segment_begin, end = place.segment_end;
    while (end - begin > 1) {
      const int middle = (begin + end) / 2;
      if (segments[middle].q_begin <= q)
        begin = middle;
      else
        end = middle;
    }
    return segments[begin];
  }
  // The entry that has to finish the row group before. The last turn has all groups that the others
  // have not.
  MAGI_HOST_DEVICE int32_t after(const BwdPlace& place, int row_group) const {
    int begin = place.turn_begin, end = place.turn_end - 1;
    while (begin < end) {
      const int middle = (begin + end) / 2;
      if (turns[middle].last_row_group < row_group)
        begin = middle + 1;
      else
        end = middle;
    }
    return turns[begin].after;
  }

  // A row's group, and whether the group begins with it.
  struct Place {
    int row_group;
    bool is_first;
  };
  MAGI_HOST_DEVICE Place row_place(const BwdPlace& place, int q) const {
    const BwdSegment segment = segment_of(place, q);
    const int rows = q - segment.q_begin;
    return {segment.row_group + rows / kBwdTileQ, rows % kBwdTileQ == 0};
  }

  // The step of rows [q, q + kBwdTileQ) of an entry. For a row group that it shares with an earlier
  // step, that one has waited. Calls `between` a few times between loads that take long, for what
  // the thread has to do meanwhile.
  template <class Between>
  MAGI_HOST_DEVICE BwdVisit visit(int entry_index, const BwdEntry& entry, int q, bool descending,
                                  Between&& between) const {
    const BwdPlace& place = places[entry_index];
    const int q_end = q + kBwdTileQ < entry.q_end ? q + kBwdTileQ : entry.q_end;
    const Place first = row_place(place, q);
    between();
    // True if another step of the entry shares the first group, or the last one.
    const bool shares_first = q > entry.q_begin && !first.is_first;
    const bool shares_last = q_end < entry.q_end && !row_place(place, q_end).is_first;
    const bool two = row_place(place, q_end - 1).row_group != first.row_group;
    between();
    const bool shares_next = descending ? shares_first : shares_last;
    const bool shares_before = descending ? shares_last : shares_first;
    // Of two row groups, the one that the walk meets first ends here, and so does a single one or
    // the other one unless a later step shares it.
    const bool ends_first = !shares_next || (two && !descending);
    const bool ends_second = two && (!shares_next || descending);
    const bool waited_second = shares_before && two && descending;
    BwdVisit visit;
    visit.row_group = first.row_group;
    if (!shares_before || waited_second) visit.after_first = after(place, first.row_group);
    between();
    if (two && !waited_second) visit.after_second = after(place, first.row_group + 1);
    visit.signal = (entry_index + 1) * BwdVisit::kAllFlags + two * BwdVisit::kTwo +
                   ends_first * BwdVisit::kEndsFirst + ends_second * BwdVisit::kEndsSecond +
                   shares_before * BwdVisit::kContinues;
    return visit;
  }
  MAGI_HOST_DEVICE BwdVisit visit(int entry_index, const BwdEntry& entry, int q,
                                  bool descending) const {
    return visit(entry_index, entry, q, descending, [] {});
  }
};

}  // namespace magi
