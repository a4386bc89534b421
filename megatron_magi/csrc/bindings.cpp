// The Python names of the planner: m.def lines and the conversions between numpy and spans.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "arrays.h"
#include "planner/chunking.h"
#include "planner/hash.h"
#include "planner/layout.h"
#include "planner/loads.h"
#include "planner/nodes.h"
#include "planner/rank_clock.h"
#include "planner/rank_times.h"
#include "planner/rank_view.h"
#include "planner/remote_rows.h"
#include "planner/slices.h"
#include "planner/traffic.h"
#include "planner/transfers.h"

namespace py = pybind11;

namespace {

int32_t narrow(int64_t value) {
  if (value < std::numeric_limits<int32_t>::min() || value > std::numeric_limits<int32_t>::max()) {
    throw std::invalid_argument("positions must fit in int32, got " + std::to_string(value) +
                                "; split the sequence");
  }
  return static_cast<int32_t>(value);
}

Int32Array slices_to(const std::vector<magi::Slice>& slices) {
  Int32Array rows({static_cast<py::ssize_t>(slices.size()), static_cast<py::ssize_t>(6)});
  int32_t* out = rows.mutable_data();
  for (const magi::Slice& s : slices) {
    for (const int64_t value : {s.q_start, s.q_end, s.k_start, s.k_end, s.d_lo, s.d_hi}) {
      *out++ = narrow(value);
    }
  }
  return rows;
}

Int32Array canonical_slices(const Int32Array& rows) {
  std::vector<magi::Slice> kept;
  for (const magi::Slice& slice : slices_from(rows)) {
    if (const magi::Slice tight = magi::tighten(slice); !tight.empty()) kept.push_back(tight);
  }
  return slices_to(kept);
}

py::array_t<int64_t> slice_areas(const Int32Array& rows) {
  const std::vector<magi::Slice> slices = slices_from(rows);
  py::array_t<int64_t> areas(static_cast<py::ssize_t>(slices.size()));
  int64_t* out = areas.mutable_data();
  for (const magi::Slice& slice : slices) *out++ = magi::area(magi::tighten(slice));
  return areas;
}

Int32Array cut_slices(const Int32Array& rows, int64_t q_start, int64_t q_end, int64_t k_start,
                      int64_t k_end) {
  std::vector<magi::Slice> kept;
  for (const magi::Slice& slice : slices_from(rows)) {
    const magi::Slice part = magi::cut(slice, {q_start, q_end}, {k_start, k_end});
    if (!part.empty()) kept.push_back(part);
  }
  return slices_to(kept);
}

py::object find_overlap(const Int32Array& rows) {
  const std::vector<magi::Slice> given = slices_from(rows);
  std::vector<magi::Slice> slices;
  std::vector<int64_t> index;  // of the given slice
  for (size_t i = 0; i < given.size(); ++i) {
    const magi::Slice tight = magi::tighten(given[i]);
    if (tight.empty()) continue;
    slices.push_back(tight);
    index.push_back(static_cast<int64_t>(i));
  }
  std::optional<std::pair<int64_t, int64_t>> found;
  {
    py::gil_scoped_release nogil;
    found = magi::find_overlap(slices);
  }
  if (!found) return py::none();
  return py::make_tuple(index[found->first], index[found->second]);
}

uint64_t hash64(const py::bytes& data, uint64_t seed) {
  const std::string_view text = data;
  return magi::hash64(std::as_bytes(std::span(text.data(), text.size())), seed);
}

std::optional<int64_t> optional_from(int64_t value) {
  return value < 0 ? std::nullopt : std::optional<int64_t>(value);
}

Int32Array ints_to(const std::vector<int32_t>& values) {
  return Int32Array(static_cast<py::ssize_t>(values.size()), values.data());
}

Int64Array longs_to(const std::vector<int64_t>& values) {
  return Int64Array(static_cast<py::ssize_t>(values.size()), values.data());
}

Int32Array ranges_to(const std::vector<magi::Range>& ranges) {
  Int32Array rows({static_cast<py::ssize_t>(ranges.size()), static_cast<py::ssize_t>(2)});
  int32_t* out = rows.mutable_data();
  for (const magi::Range& range : ranges) {
    *out++ = narrow(range.start);
    *out++ = narrow(range.end);
  }
  return rows;
}

std::vector<magi::Range> ranges_from(const Int32Array& rows) {
  if (rows.ndim() != 2 || rows.shape(1) != 2) {
    throw std::invalid_argument("ranges must be int32 [N, 2] (start, end), got ndim " +
                                std::to_string(rows.ndim()) + "; stack one row per range");
  }
  const auto view = rows.unchecked<2>();
  std::vector<magi::Range> ranges(static_cast<size_t>(view.shape(0)));
  for (py::ssize_t i = 0; i < view.shape(0); ++i) ranges[i] = {view(i, 0), view(i, 1)};
  return ranges;
}

Int32Array transfers_to(const std::vector<magi::Transfer>& transfers) {
  Int32Array rows({static_cast<py::ssize_t>(transfers.size()), static_cast<py::ssize_t>(5)});
  int32_t* out = rows.mutable_data();
  for (const magi::Transfer& t : transfers) {
    *out++ = t.stage;
    *out++ = t.dst;
    *out++ = t.src;
    *out++ = narrow(t.rows.start);
    *out++ = narrow(t.rows.end);
  }
  return rows;
}

std::vector<magi::Transfer> transfers_from(const Int32Array& rows) {
  if (rows.ndim() != 2 || rows.shape(1) != 5) {
    throw std::invalid_argument(
        "transfers must be int32 [M, 5] (stage, dst, src, start, end), got ndim " +
        std::to_string(rows.ndim()) + "; pass the array of an AttnPlan");
  }
  const auto view = rows.unchecked<2>();
  std::vector<magi::Transfer> transfers(static_cast<size_t>(view.shape(0)));
  for (py::ssize_t i = 0; i < view.shape(0); ++i) {
    transfers[i] = {view(i, 0), view(i, 1), view(i, 2), {view(i, 3), view(i, 4)}};
  }
  return transfers;
}

// A checked layout, and the array that its span looks into.
class OwnedLayout {
 public:
  OwnedLayout(int64_t total_seqlen, int64_t chunk_size, int64_t cp_size, Int32Array chunk_ranks)
      : chunk_ranks_(std::move(chunk_ranks)),
        layout_{total_seqlen,
                chunk_size,
                cp_size,
                {chunk_ranks_.data(), static_cast<size_t>(chunk_ranks_.size())}} {
    magi::check(layout_);
  }
  const magi::Layout& operator*() const { return layout_; }
  const magi::Layout* operator->() const { return &layout_; }

 private:
  const Int32Array chunk_ranks_;
  const magi::Layout layout_;
};

py::tuple solve_dispatch(const Int32Array& slices, int64_t num_local_tokens, int64_t cp_size,
                         int64_t chunk_size, int64_t tile_q, int64_t tile_k,
                         int64_t max_imbalance_ppm, int64_t swap_trials, int64_t ranks_per_node,
                         const magi::RankClock* clock, int64_t row_time) {
  const std::vector<magi::Slice> given = slices_from(slices);
  magi::Dispatch dispatch;
  {
    py::gil_scoped_release nogil;
    dispatch = magi::solve_dispatch({given, num_local_tokens, cp_size, optional_from(chunk_size),
                                     tile_q, tile_k, max_imbalance_ppm, swap_trials, ranks_per_node,
                                     clock, row_time});
  }
  return py::make_tuple(dispatch.chunk_size, ints_to(dispatch.chunk_ranks),
                        longs_to(dispatch.times));
}

magi::Nodes nodes_from(int64_t ranks_per_node, int64_t cp_size) {
  if (ranks_per_node < 0 || (ranks_per_node > 0 && cp_size % ranks_per_node != 0)) {
    throw std::invalid_argument("ranks_per_node must divide cp_size (" + std::to_string(cp_size) +
                                "), got " + std::to_string(ranks_per_node));
  }
  return {ranks_per_node};
}

py::tuple solve_transfers(const OwnedLayout& layout, const Int32Array& slices, int64_t tile_q,
                          int64_t tile_k, int64_t degree, int64_t forward,
                          const magi::StageCosts& costs, int64_t ranks_per_node,
                          const std::optional<Int64Array>& rank_times) {
  const magi::Nodes nodes = nodes_from(ranks_per_node, layout->cp_size);
  const std::vector<magi::Slice> given = slices_from(slices);
  std::vector<int64_t> times;
  if (rank_times) times.assign(rank_times->data(), rank_times->data() + rank_times->size());
  if (!times.empty() && std::ssize(times) != layout->cp_size) {
    throw std::invalid_argument("times must have one value for each of " +
                                std::to_string(layout->cp_size) + " ranks or none, got " +
                                std::to_string(times.size()) + "; pass those of rank_times");
  }
  magi::TransferPlan plan;
  {
    py::gil_scoped_release nogil;
    std::optional<magi::Forward> chosen;
    if (forward >= 0) chosen = static_cast<magi::Forward>(forward);
    plan = magi::solve_transfers(
        {given, *layout, tile_q, tile_k, optional_from(degree), chosen, costs, nodes, times});
  }
  return py::make_tuple(plan.staging.degree, static_cast<int>(plan.staging.forward),
                        transfers_to(plan.transfers), longs_to(plan.loads));
}

Int64Array rank_times(const OwnedLayout& layout, const Int32Array& slices,
                      const magi::RankClock& clock) {
  const std::vector<magi::Slice> given = slices_from(slices);
  std::vector<int64_t> times;
  {
    py::gil_scoped_release nogil;
    if (magi::can_time(given, *layout)) times = magi::rank_times(given, *layout, clock);
  }
  return longs_to(times);
}

// [cp_size, 4]: own tiles, remote tiles, local tiles, remote rows.
Int64Array rank_work(const OwnedLayout& layout, const Int32Array& slices, const Int64Array& loads,
                     const Int64Array& link_rows) {
  if (loads.size() != layout->cp_size || link_rows.size() != layout->cp_size) {
    throw std::invalid_argument("loads and link_rows must have one value for each of " +
                                std::to_string(layout->cp_size) + " ranks, got " +
                                std::to_string(loads.size()) + " and " +
                                std::to_string(link_rows.size()) + "; pass those of the plan");
  }
  const std::vector<magi::Slice> given = slices_from(slices);
  const std::span tiles(loads.data(), static_cast<size_t>(loads.size()));
  const std::span on_link(link_rows.data(), static_cast<size_t>(link_rows.size()));
  std::vector<magi::RankWork> work;
  {
    py::gil_scoped_release nogil;
    work = magi::rank_work(given, *layout, tiles, on_link);
  }
  Int64Array rows({static_cast<py::ssize_t>(work.size()), static_cast<py::ssize_t>(4)});
  int64_t* out = rows.mutable_data();
  for (const magi::RankWork& rank : work) {
    for (const int64_t value :
         {rank.own_tiles, rank.remote_tiles, rank.local_tiles, rank.remote_rows}) {
      *out++ = value;
    }
  }
  return rows;
}

std::vector<magi::RankWork> rank_work_from(const Int64Array& rows) {
  if (rows.ndim() != 2 || rows.shape(1) != 4) {
    throw std::invalid_argument("work must be int64 [cp_size, 4], got ndim " +
                                std::to_string(rows.ndim()) + "; pass what rank_work returns");
  }
  const auto view = rows.unchecked<2>();
  std::vector<magi::RankWork> work(static_cast<size_t>(view.shape(0)));
  for (py::ssize_t i = 0; i < view.shape(0); ++i) {
    work[i] = {view(i, 0), view(i, 1), view(i, 2), view(i, 3)};
  }
  return work;
}

double to_us(magi::TimePs time) {
  return static_cast<double>(time) * 1e-6;
}

// [cp_size, num_stages, 4]: receive_start, receive_end, compute_start, compute_end.
py::array_t<double> forward_stages(const magi::StageCosts& costs, const Int64Array& work,
                                   int64_t degree, int64_t forward) {
  const magi::Staging staging{degree, static_cast<magi::Forward>(forward)};
  std::vector<double> times;
  py::ssize_t num_ranks = 0, num_stages = 0;
  for (const magi::RankWork& rank : rank_work_from(work)) {
    const std::vector<magi::StageTime> stages = magi::forward_stages(rank, costs, staging);
    num_stages = static_cast<py::ssize_t>(stages.size());
    ++num_ranks;
    for (const magi::StageTime& t : stages) {
      for (const magi::TimePs at :
           {t.receive_start, t.receive_end, t.compute_start, t.compute_end}) {
        times.push_back(to_us(at));
      }
    }
  }
  return py::array_t<double>({num_ranks, num_stages, static_cast<py::ssize_t>(4)}, times.data());
}

// [cp_size].
py::array_t<double> backward_times(const magi::StageCosts& costs, const Int64Array& work,
                                   int64_t degree) {
  std::vector<double> times;
  for (const magi::RankWork& rank : rank_work_from(work)) {
    times.push_back(to_us(magi::backward_time_ps(std::span(&rank, 1), costs, degree)));
  }
  return py::array_t<double>(static_cast<py::ssize_t>(times.size()), times.data());
}

Int64Array rows_on_link(const OwnedLayout& layout, const Int32Array& transfers,
                        const magi::StageCosts& costs, int64_t ranks_per_node) {
  const std::vector<int64_t> rows =
      magi::rows_on_link(transfers_from(transfers), layout->cp_size, costs,
                         nodes_from(ranks_per_node, layout->cp_size));
  return Int64Array(static_cast<py::ssize_t>(rows.size()), rows.data());
}

int64_t rows_to_travel(const OwnedLayout& layout, const Int32Array& slices) {
  const magi::Segments segments = magi::make_segments(
      magi::keys_by_block(slices_from(slices), layout->chunk_size, layout->num_chunks()),
      layout->chunk_size);
  magi::Traffic traffic(segments, layout->cp_size);
  traffic.assign(layout->chunk_ranks);
  return traffic.total();
}

Int32Array shift_transfers(const OwnedLayout& layout, int64_t shift) {
  return transfers_to(magi::shift_transfers(*layout, shift));
}

Int32Array local_ranges(const OwnedLayout& layout, int32_t rank) {
  std::vector<magi::Range> ranges;
  for (const magi::Placed& run : magi::local_runs(*layout, rank)) ranges.push_back(run.rows);
  return ranges_to(ranges);
}

py::tuple table_to(const magi::CastTable& table) {
  return py::make_tuple(ranges_to(table.send_ranges), py::tuple(py::cast(table.send_counts)),
                        py::tuple(py::cast(table.recv_counts)), ranges_to(table.recv_ranges));
}

py::tuple cast_table(const OwnedLayout& layout, const Int32Array& transfers, int32_t rank) {
  return table_to(magi::cast_table(transfers_from(transfers), *layout, rank));
}

py::tuple node_cast_table(const OwnedLayout& layout, const Int32Array& transfers,
                          int64_t ranks_per_node, int32_t rank) {
  const magi::Nodes nodes = nodes_from(ranks_per_node, layout->cp_size);
  const auto table = magi::node_cast_table(transfers_from(transfers), *layout, nodes, rank);
  return py::make_tuple(table_to(table.first), table_to(table.spreading));
}

Int32Array crossing_leg(const Int32Array& transfers, int64_t ranks_per_node) {
  if (ranks_per_node < 1) {
    throw std::invalid_argument("ranks_per_node must be >= 1, got " +
                                std::to_string(ranks_per_node));
  }
  return transfers_to(magi::crossing_leg(transfers_from(transfers), {ranks_per_node}));
}

Int32Array stage_slices(const OwnedLayout& layout, const Int32Array& slices, int32_t rank,
                        const Int32Array& key_ranges,
                        const std::optional<Int32Array>& query_ranges) {
  const std::vector<magi::Slice> given = slices_from(slices);
  const std::vector<magi::Range> buffer = ranges_from(key_ranges);
  std::vector<magi::Placed> queries = magi::local_runs(*layout, rank);
  if (query_ranges) queries = magi::within(queries, ranges_from(*query_ranges));
  std::vector<magi::Slice> local;
  {
    py::gil_scoped_release nogil;
    std::vector<magi::Placed> keys;
    int64_t at = 0;
    for (const magi::Range& rows : buffer) {
      keys.push_back({rows, at});
      at += rows.size();
    }
    local = magi::local_slices(given, queries, keys);
  }
  return slices_to(local);
}

py::tuple split_rows(const OwnedLayout& layout, const Int32Array& slices, int32_t rank) {
  const std::vector<magi::Range> waiting = magi::remote_rows(slices_from(slices), *layout, rank);
  return py::make_tuple(ranges_to(magi::other_rows(waiting, *layout, rank)), ranges_to(waiting));
}

void bind_layout(py::module_& m) {
  py::class_<magi::StageCosts>(m, "StageCosts", "What stages take, in picoseconds.")
      .def(py::init<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>(), py::kw_only(),
           py::arg("row_ps"), py::arg("grad_row_ps"), py::arg("tile_ps"), py::arg("exchange_ps"),
           py::arg("call_ps"), py::arg("pass_ps"), py::arg("crossing_row_ps") = 0)
      .def_readonly("row_ps", &magi::StageCosts::row_ps)
      .def_readonly("grad_row_ps", &magi::StageCosts::grad_row_ps)
      .def_readonly("tile_ps", &magi::StageCosts::tile_ps)
      .def_readonly("exchange_ps", &magi::StageCosts::exchange_ps)
      .def_readonly("call_ps", &magi::StageCosts::call_ps)
      .def_readonly("pass_ps", &magi::StageCosts::pass_ps)
      .def_readonly("crossing_row_ps", &magi::StageCosts::crossing_row_ps)
      .def("forward_stages", &forward_stages, py::arg("work"), py::arg("degree"),
           py::arg("forward"), "Every rank's stages on the modelled time line, in microseconds.")
      .def("backward_times", &backward_times, py::arg("work"), py::arg("degree"),
           "Every rank's modelled backward, in microseconds.");
  py::class_<OwnedLayout>(m, "Layout", "Who owns which rows (planner/layout.h); checked.")
      .def(py::init<int64_t, int64_t, int64_t, Int32Array>(), py::arg("total_seqlen"),
           py::arg("chunk_size"), py::arg("cp_size"), py::arg("chunk_ranks"))
      .def("solve_transfers", &solve_transfers, py::arg("slices"), py::arg("tile_q"),
           py::arg("tile_k"), py::arg("degree"), py::arg("forward"), py::arg("costs"),
           py::arg("ranks_per_node") = 0, py::arg("times") = py::none(),
           "Degree, forward mode, transfers and loads (planner/transfers.h).")
      .def("rank_times", &rank_times, py::arg("slices"), py::arg("clock"),
           "Every rank's time by the clock (planner/rank_times.h); none if that takes too long.")
      .def("rows_on_link", &rows_on_link, py::arg("transfers"), py::arg("costs"),
           py::arg("ranks_per_node") = 0, "Rows that the model of times counts, by rank.")
      .def("rank_work", &rank_work, py::arg("slices"), py::arg("loads"), py::arg("link_rows"),
           "Tiles and rows of every rank, as the model of times takes them (planner/stages.h).")
      .def("rows_to_travel", &rows_to_travel, py::arg("slices"),
           "Key rows that all ranks receive together.")
      .def("shift_transfers", &shift_transfers, py::arg("shift"),
           "The transfers of a shift along the sequence.")
      .def("local_ranges", &local_ranges, py::arg("rank"), "A rank's rows as ascending runs.")
      .def("cast_table", &cast_table, py::arg("transfers"), py::arg("rank"),
           "Ranges and counts that a rank sends and receives.")
      .def("node_cast_table", &node_cast_table, py::arg("transfers"), py::arg("ranks_per_node"),
           py::arg("rank"),
           "The tables of both steps of an exchange among nodes (planner/nodes.h).")
      .def("stage_slices", &stage_slices, py::arg("slices"), py::arg("rank"), py::arg("key_ranges"),
           py::arg("query_ranges") = py::none(),
           "The mask in local rows of a rank and in rows of a key buffer.")
      .def("split_rows", &split_rows, py::arg("slices"), py::arg("rank"),
           "Own rows that see own keys only, and the others.");
}

}  // namespace

void bind_kernel(py::module_& m);  // bindings_kernel.cpp

PYBIND11_MODULE(_solver, m) {
  m.doc() = "Host side of megatron_magi: slices, planning, work lists. No torch, no CUDA.";
  m.def("canonical_slices", &canonical_slices, py::arg("slices"));
  m.def("slice_areas", &slice_areas, py::arg("slices"));
  m.def("cut_slices", &cut_slices, py::arg("slices"), py::arg("q_start"), py::arg("q_end"),
        py::arg("k_start"), py::arg("k_end"));
  m.def("find_overlap", &find_overlap, py::arg("slices"));
  m.def("solve_dispatch", &solve_dispatch, py::arg("slices"), py::arg("num_local_tokens"),
        py::arg("cp_size"), py::arg("chunk_size"), py::arg("tile_q"), py::arg("tile_k"),
        py::arg("max_imbalance_ppm"), py::arg("swap_trials"), py::arg("ranks_per_node") = 0,
        py::arg("clock") = py::none(), py::arg("row_time") = 0,
        "Chunk size, the chunks' ranks, and the ranks' times by the clock (planner/chunking.h).");
  m.def("crossing_leg", &crossing_leg, py::arg("transfers"), py::arg("ranks_per_node"),
        "The transfers between nodes, each row once for each node (planner/nodes.h).");
  m.def("hash64", &hash64, py::arg("data"), py::arg("seed") = 0);
  py::class_<magi::RankClock>(m, "RankClock", "Predicts a rank's time (planner/rank_clock.h).");
  bind_layout(m);
  bind_kernel(m);
}
