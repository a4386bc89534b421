// The end time of a launch whose blocks start in order, each on the processor that is free first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <queue>
#include <vector>

namespace magi {

class Makespan {
 public:
  explicit Makespan(int64_t num_sms) {
    for (int64_t i = 0; i < num_sms; ++i) free_.push(0.);
  }

  // Adds `count` blocks of this cost.
  void add(double cost, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const double end = free_.top() + cost;
      free_.pop();
      free_.push(end);
      last_ = std::max(last_, end);
    }
  }

  double last() const { return last_; }

 private:
  std::priority_queue<double, std::vector<double>, std::greater<double>> free_;
  double last_ = 0.;
};

}  // namespace magi
