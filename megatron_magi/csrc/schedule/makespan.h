// The end time of a launch whose blocks start in order, each on the processor that is free first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace magi {

class Makespan {
 public:
  explicit Makespan(int64_t num_sms) : free_(static_cast<size_t>(num_sms), 0.) {}

  // Adds `count` blocks of this cost.
  void add(double cost, int64_t count) {
    for (int64_t i = 0; i < count; ++i) add_until(free_.front() + cost);
  }

  // When the next block starts.
  double next() const { return free_.front(); }
  // Adds the next block, which ends at this time.
  void add_until(double end) {
    replace_first(end);
    last_ = std::max(last_, end);
  }

  double last() const { return last_; }

 private:
  // Puts a later time in the place of the earliest. std::priority_queue can only pop and push,
  // which walks the heap twice.
  void replace_first(double end) {
    const size_t size = free_.size();
    size_t at = 0;
    for (size_t child = 1; child < size; child = 2 * at + 1) {
      if (child + 1 < size && free_[child + 1] < free_[child]) ++child;
      if (free_[child] >= end) break;
      free_[at] = free_[child];
      at = child;
    }
    free_[at] = end;
  }

  std::vector<double> free_;  // a heap, the earliest first
  double last_ = 0.;
};

}  // namespace magi
