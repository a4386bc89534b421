#include "planner/rank_times.h"

#include <numeric>

#include "planner/loads.h"
#include "planner/needs.h"
#include "planner/rank_view.h"

namespace magi {
namespace {

// A view of every rank goes through the pairs of its chunks and slices, and of its runs of keys.
constexpr int64_t kMostPieces = 1 << 20;

// The slices that a rank's rows touch, for the ranks that are asked for.
std::vector<std::vector<Slice>> slices_by_rank(std::span<const Slice> slices, const Layout& layout,
                                               const std::vector<bool>& asked) {
  std::vector<std::vector<Slice>> found(layout.cp_size);
  std::vector<int64_t> last(layout.cp_size, -1);  // the slice that a rank took last
  for (size_t i = 0; i < slices.size(); ++i) {
    const int64_t end = (slices[i].q_end - 1) / layout.chunk_size;
    for (int64_t c = slices[i].q_start / layout.chunk_size; c <= end; ++c) {
      const int32_t rank = layout.chunk_ranks[c];
      if (!asked[rank] || last[rank] == static_cast<int64_t>(i)) continue;
      last[rank] = static_cast<int64_t>(i);
      found[rank].push_back(slices[i]);
    }
  }
  return found;
}

int64_t time_of(std::span<const Slice> slices, const RangeLists& keys, const Layout& layout,
                int32_t rank, const RankClock& clock) {
  const std::vector<Placed> own = local_runs(layout, rank);
  std::vector<Placed> buffer = own;
  int64_t num_k = layout.num_local_tokens();
  for (const Transfer& received : rank_transfers(keys, layout, rank)) {
    buffer.push_back({received.rows, num_k});
    num_k += received.rows.size();
  }
  return clock.time(local_slices(slices, own, buffer), layout.num_local_tokens(), num_k);
}

// The ranks that own or read a chunk whose owner changed: received rows are ordered by owner.
std::vector<bool> changed_ranks(const RangeLists& keys, const Layout& layout,
                                const std::vector<int32_t>& before) {
  const int64_t num_chunks = layout.num_chunks();
  std::vector<bool> changed(layout.cp_size);
  std::vector<int32_t> until(num_chunks + 1);  // changed chunks before this one
  for (int64_t c = 0; c < num_chunks; ++c) {
    const bool moved = layout.chunk_ranks[c] != before[c];
    until[c + 1] = until[c] + (moved ? 1 : 0);
    if (moved) changed[layout.chunk_ranks[c]] = changed[before[c]] = true;
  }
  for (int64_t c = 0; c < num_chunks; ++c) {
    for (const Range& range : keys.of(c)) {
      const int64_t first = range.start / layout.chunk_size;
      const int64_t last = (range.end - 1) / layout.chunk_size;
      if (until[last + 1] > until[first]) changed[layout.chunk_ranks[c]] = true;
    }
  }
  return changed;
}

}  // namespace

std::vector<int64_t> rank_times(std::span<const Slice> slices, const Layout& layout,
                                const RankClock& clock, const std::optional<TimedChunks>& before) {
  const RangeLists keys = keys_by_block(slices, layout.chunk_size, layout.num_chunks());
  std::vector<bool> asked(layout.cp_size, true);
  std::vector<int64_t> times(layout.cp_size);
  if (before) {
    asked = changed_ranks(keys, layout, before->chunk_ranks);
    times = before->times;
  }
  const std::vector<std::vector<Slice>> of_rank = slices_by_rank(slices, layout, asked);
  for (int32_t rank = 0; rank < layout.cp_size; ++rank) {
    if (asked[rank]) times[rank] = time_of(of_rank[rank], keys, layout, rank, clock);
  }
  return times;
}

bool can_time(std::span<const Slice> slices, const Layout& layout) {
  int64_t pieces = 0;  // runs of keys that chunks read, at most
  for (const Slice& s : slices) {
    const int64_t chunks = (s.q_end - 1) / layout.chunk_size - s.q_start / layout.chunk_size + 1;
    pieces += chunks * ((s.k_end - 1) / layout.chunk_size - s.k_start / layout.chunk_size + 1);
    if (pieces > kMostPieces) return false;
  }
  return true;
}

std::vector<int64_t> shares(std::span<const int64_t> times, int64_t total) {
  const __int128 all = std::reduce(times.begin(), times.end(), int64_t{0});
  const auto count = static_cast<int64_t>(times.size());
  std::vector<int64_t> parts(times.size(), total / count);
  __int128 sum = 0;
  int64_t given = 0;  // of the total, to the ranks so far
  for (size_t i = 0; i < times.size() && all > 0; ++i) {
    sum += times[i];
    const auto until = static_cast<int64_t>((2 * total * sum + all) / (2 * all));  // to the nearest
    parts[i] = until - given;
    given = until;
  }
  return parts;
}

}  // namespace magi
