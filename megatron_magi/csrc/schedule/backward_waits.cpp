#include "schedule/backward_waits.h"

#include <algorithm>

#include "planner/ceil_div.h"
#include "schedule/makespan.h"

namespace magi {
namespace {

// Bounds of the host's time and no costs: how finely a launch is simulated, and from how many
// blocks for every processor on only its first sections are.
constexpr int64_t kPiecesPerItem = 16;
constexpr size_t kMaxStopsPerItem = 64;
constexpr int64_t kLongSection = 8;
constexpr int64_t kVeryLongSection = 64;

}  // namespace

BwdWaits::BwdWaits(const BwdWorkList& list, double lag) : lag_(lag) {
  const auto items = std::max<int64_t>(static_cast<int64_t>(list.items.size()), 1);
  const int64_t tiles = std::max<int64_t>(ceil_div(list.steps, items * kPiecesPerItem), 1);
  stops_.reserve(static_cast<size_t>(items * kPiecesPerItem * 2));
  // Pieces begin with segments, because documents that share a piece would wait in vain. Of a trunk
  // with very many branches they would be too many.
  if (!cut(list, list.segments, tiles * kBwdTileQ))
    cut(list, std::span(list.segments).first(1), tiles * kBwdTileQ);
}

bool BwdWaits::cut(const BwdWorkList& list, std::span<const BwdSegment> segments,
                   int64_t piece_rows) {
  stops_.clear();
  ends_.clear();
  first_.assign(segments.size(), 0);
  num_pieces_ = 0;
  int64_t last_row = 0;
  for (const BwdEntry& entry : list.entries) last_row = std::max<int64_t>(last_row, entry.q_end);
  for (size_t i = 0; i < segments.size(); ++i) {
    const int64_t end = i + 1 < segments.size() ? segments[i + 1].q_begin : last_row;
    first_[i] = static_cast<int32_t>(num_pieces_);
    num_pieces_ += std::max<int64_t>(ceil_div(end - segments[i].q_begin, piece_rows), 1);
  }
  for (const BwdItem& item : list.items) {
    const size_t begin = stops_.size();
    for (int32_t e = item.entry_begin; e < item.entry_end; ++e)
      add_stops(list.entries[static_cast<size_t>(e)], segments, piece_rows);
    if (list.descending) std::reverse(stops_.begin() + static_cast<int64_t>(begin), stops_.end());
    ends_.push_back(stops_.size());
    if (segments.size() > 1 && stops_.size() > kMaxStopsPerItem * list.items.size()) return false;
  }
  return true;
}

void BwdWaits::add_stops(const BwdEntry& entry, std::span<const BwdSegment> segments,
                         int64_t piece_rows) {
  const double rows = entry.q_end - entry.q_begin;
  const double tiles_per_row =
      static_cast<double>(ceil_div(entry.q_end - entry.q_begin, kBwdTileQ)) / rows;
  const auto above = std::ranges::upper_bound(segments, entry.q_begin, {}, &BwdSegment::q_begin);
  auto segment = static_cast<size_t>(above - segments.begin()) - 1;
  int64_t piece = (entry.q_begin - segments[segment].q_begin) / piece_rows;
  for (int64_t q = entry.q_begin; q < entry.q_end;) {
    const int64_t cut = segments[segment].q_begin + (piece + 1) * piece_rows;
    const bool is_last = segment + 1 == segments.size();
    const int64_t next = is_last ? cut : std::min<int64_t>(cut, segments[segment + 1].q_begin);
    const int64_t end = std::min<int64_t>(next, entry.q_end);
    stops_.push_back({first_[segment] + static_cast<int32_t>(piece),
                      static_cast<float>(static_cast<double>(end - q) * tiles_per_row)});
    ++piece;
    if (!is_last && end == segments[segment + 1].q_begin) ++segment, piece = 0;
    q = end;
  }
}

double BwdWaits::makespan(int64_t num_sms, const BwdLanes& lanes, double overhead) const {
  Makespan launch(num_sms);
  const auto pieces = static_cast<size_t>(num_pieces_);
  std::vector<double> left(pieces * static_cast<size_t>(lanes.count));
  // Long sections hardly overlap, and the third takes as long as the second. Of very long ones each
  // but the last takes as long as its blocks, shared equally.
  const auto blocks = static_cast<int64_t>(ends_.size()) * lanes.count;
  const int64_t most = blocks < kVeryLongSection * num_sms ? 2 : 1;
  const int64_t simulated = blocks < kLongSection * num_sms ? lanes.sections : most;
  std::vector<double> ends;
  double busy = 0.;
  for (int64_t section = 0; section < std::min(lanes.sections, simulated); ++section) {
    std::ranges::fill(left, 0.);
    for (size_t item = 0; item < ends_.size(); ++item) {
      for (size_t lane = 0; lane < static_cast<size_t>(lanes.count); ++lane) {
        const double start = launch.next();
        double now = start + overhead / 2;
        for (size_t i = item == 0 ? 0 : ends_[item - 1]; i < ends_[item]; ++i) {
          double& before = left[lane * pieces + static_cast<size_t>(stops_[i].piece)];
          now = std::max(now + stops_[i].tiles * static_cast<double>(lanes.heads), before + lag_);
          before = now;
        }
        launch.add_until(now + overhead / 2);
        busy += now + overhead / 2 - start;
      }
    }
    ends.push_back(launch.last());
  }
  const double last =
      ends.size() > 1 ? ends.back() - ends[ends.size() - 2] : busy / static_cast<double>(num_sms);
  return ends.back() +
         last * static_cast<double>(lanes.sections - static_cast<int64_t>(ends.size()));
}

}  // namespace magi
