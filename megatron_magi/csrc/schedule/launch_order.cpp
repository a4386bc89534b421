#include "schedule/launch_order.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "schedule/makespan.h"

namespace magi {
namespace {

constexpr double kTolerance = 1.01;
constexpr int kMostEighths = 16;  // of the longest received block and its gradients' return

using Order = std::vector<int32_t>;

// The blocks of an item for all lanes of a section, which start together.
struct Unit {
  double cost = 0.;  // of each
  bool is_received = false;
};

class Launch {
 public:
  Launch(const BwdWorkList& list, const BwdSchedule& schedule, const BwdProcessors& processors)
      : num_sms_(processors.num_sms), blocks_(schedule.lanes_per_section) {
    const int64_t sections = processors.num_heads_kv * schedule.num_splits / blocks_;
    for (int64_t section = 0; section < sections; ++section)
      for (const BwdItem& item : list.items)
        units_.push_back({bwd_block_cost(item, processors.group, schedule.num_splits),
                          item.k_start >= list.num_own});
  }

  Order listed() const {
    Order order(units_.size());
    std::iota(order.begin(), order.end(), 0);
    return order;
  }

  // Until received keys have arrived own units start, then all in list order.
  Order deferred(double arrival) const {
    Makespan clock(num_sms_);
    Order order, late;
    size_t taken = 0;  // of the late ones
    const auto start = [&](int32_t unit) {
      order.push_back(unit);
      clock.add(units_[unit].cost, blocks_);
    };
    for (const int32_t unit : listed()) {
      while (taken < late.size() && clock.next() >= arrival) start(late[taken++]);
      if (units_[unit].is_received && clock.next() < arrival)
        late.push_back(unit);
      else
        start(unit);
    }
    order.insert(order.end(), late.begin() + static_cast<int64_t>(taken), late.end());
    return order;
  }

  // The last own units, work for so much time, start behind all received ones; from there on the
  // longest come first among own and among received ones.
  Order with_own_last(Order order, double time) const {
    double left = time * static_cast<double>(num_sms_) / static_cast<double>(blocks_);
    auto first = order.end();
    while (first != order.begin() && left > 0.)
      if (const Unit& unit = units_[*--first]; !unit.is_received) left -= unit.cost;
    std::stable_sort(first, order.end(), [&](int32_t i, int32_t j) {
      const Unit &a = units_[i], &b = units_[j];
      return a.is_received != b.is_received ? a.is_received : a.cost > b.cost;
    });
    return order;
  }

  // When the last block has ended and the gradients have returned.
  double end(const Order& order, const BwdTravel& travel) const {
    Makespan clock(num_sms_);
    double returned = 0.;
    for (const int32_t i : order) {
      const Unit& unit = units_[i];
      const double end = clock.add(unit.cost, blocks_, unit.is_received ? travel.arrival : 0.);
      if (unit.is_received) returned = std::max(returned, end + travel.departure);
    }
    return std::max(clock.last(), returned);
  }

  double longest_received() const {
    double longest = 0.;
    for (const Unit& unit : units_)
      if (unit.is_received) longest = std::max(longest, unit.cost);
    return longest;
  }

 private:
  int64_t num_sms_, blocks_;
  std::vector<Unit> units_;  // in list order
};

Order best_order(const Launch& launch, const BwdTravel& travel) {
  const Order listed = launch.listed(), deferred = launch.deferred(travel.arrival);
  const double goal = kTolerance * launch.end(listed, {});
  const double longest = launch.longest_received();
  Order best;
  double least = std::numeric_limits<double>::infinity();
  for (int eighths = 0; eighths <= kMostEighths; ++eighths) {
    const double behind = eighths / 8. * (travel.departure + longest);
    for (const Order& front : {deferred, listed}) {
      Order order = launch.with_own_last(front, behind);
      const double end = launch.end(order, travel);
      if (end < least) best = std::move(order), least = end;
      if (least <= goal) return best;
    }
  }
  return best;
}

}  // namespace

std::vector<int32_t> launch_order(const BwdWorkList& list, const BwdSchedule& schedule,
                                  const BwdProcessors& processors, const BwdTravel& travel) {
  const auto is_received = [&](const BwdItem& item) { return item.k_start >= list.num_own; };
  const bool takes_time = travel.arrival > 0. || travel.departure > 0.;
  if (!takes_time || std::ranges::none_of(list.items, is_received)) return {};
  const Launch launch(list, schedule, processors);
  Order best = best_order(launch, travel);
  return best == launch.listed() ? Order{} : best;
}

}  // namespace magi
