// The time of a deterministic backward, in which blocks that add to the same rows wait for each
// other.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "schedule/backward.h"

namespace magi {

// Blocks of the same items that run at a time and never wait for each other: the kv heads of a
// section times the splits of their groups.
struct BwdLanes {
  int64_t count = 1;
  int64_t heads = 1;     // query heads of each
  int64_t sections = 1;  // one after another
};

// Simulates launches that walk all heads of a query tile before the next tile. A block leaves rows
// some time after the block before it that adds to them. Rows are cut into pieces, about 16 of them
// to an item, so that the cost does not grow with the number of steps.
class BwdWaits {
 public:
  // Expects a list with segments. `lag` is the time from a block's addition to the next block's, in
  // steps.
  BwdWaits(const BwdWorkList& list, double lag);

  // The end of the last block in steps, with `overhead` steps for each block.
  double makespan(int64_t num_sms, const BwdLanes& lanes, double overhead) const;

 private:
  struct Stop {
    int32_t piece = 0;
    float tiles = 0.f;
  };

  bool cut(const BwdWorkList& list, std::span<const BwdSegment> segments, int64_t piece_rows);
  void add_stops(const BwdEntry& entry, std::span<const BwdSegment> segments, int64_t piece_rows);

  std::vector<Stop> stops_;     // by item, in walk order
  std::vector<size_t> ends_;    // of the items' stops
  std::vector<int32_t> first_;  // piece of each segment
  int64_t num_pieces_ = 0;
  double lag_ = 0.;
};

}  // namespace magi
