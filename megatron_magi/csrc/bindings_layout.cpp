// Python names of a layout: what its ranks exchange, take, and compute.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "planner/layout.h"
#include "planner/nodes.h"
#include "planner/rank_view.h"
#include "planner/remote_rows.h"
#include "planner/stages.h"
#include "planner/tile_costs.h"
#include "planner/traffic.h"
#include "planner/transfers.h"

namespace py = pybind11;

namespace {

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

magi::Nodes nodes_from(int64_t ranks_per_node, int64_t cp_size) {
  if (ranks_per_node < 0 || (ranks_per_node > 0 && cp_size % ranks_per_node != 0)) {
    throw std::invalid_argument("ranks_per_node must divide cp_size (" + std::to_string(cp_size) +
                                "), got " + std::to_string(ranks_per_node));
  }
  return {ranks_per_node};
}

// A layout of the queries, and one of the keys where they have homes of their own.
magi::Homes homes_from(const OwnedLayout& queries, const OwnedLayout* keys) {
  if (keys != nullptr && (*keys)->cp_size != queries->cp_size) {
    throw std::invalid_argument("keys must lie on as many ranks as queries, " +
                                std::to_string(queries->cp_size) + ", got " +
                                std::to_string((*keys)->cp_size) + "; plan both for one group");
  }
  return {*queries, keys == nullptr ? *queries : **keys};
}

std::vector<bool> pairs_from(const std::optional<BoolArray>& pairs, int64_t cp_size) {
  if (!pairs) return {};
  if (pairs->ndim() != 2 || pairs->shape(0) != cp_size || pairs->shape(1) != cp_size) {
    throw std::invalid_argument("by_queries must be bool [cp_size, cp_size]");
  }
  return std::vector<bool>(pairs->data(), pairs->data() + pairs->size());  // not a list of two
}

py::tuple solve_transfers(const OwnedLayout& layout, const Int32Array& slices, int64_t tile_q,
                          int64_t tile_k, int64_t degree, int64_t forward,
                          const magi::StageCosts& costs, int64_t ranks_per_node,
                          const OwnedLayout* keys, const std::optional<BoolArray>& by_queries) {
  const magi::Nodes nodes = nodes_from(ranks_per_node, layout->cp_size);
  const magi::Homes homes = homes_from(layout, keys);
  std::vector<bool> pairs = pairs_from(by_queries, layout->cp_size);
  const std::vector<magi::Slice> given = slices_from(slices);
  magi::TransferPlan plan;
  {
    py::gil_scoped_release nogil;
    std::optional<magi::Forward> chosen;
    if (forward >= 0) chosen = static_cast<magi::Forward>(forward);
    plan = magi::solve_transfers({given, homes, tile_q, tile_k, std::move(pairs),
                                  optional_from(degree), chosen, costs, nodes});
  }
  return py::make_tuple(plan.staging.degree, static_cast<int>(plan.staging.forward),
                        transfers_to(plan.transfers), longs_to(plan.loads));
}

// [cp_size, 4]: own tiles, remote tiles, local tiles, remote rows.
Int64Array rank_work(const OwnedLayout& layout, const Int32Array& slices, const Int64Array& loads,
                     const Int64Array& link_rows, const OwnedLayout* keys) {
  if (loads.size() != layout->cp_size || link_rows.size() != layout->cp_size) {
    throw std::invalid_argument("loads and link_rows must have one value for each of " +
                                std::to_string(layout->cp_size) + " ranks, got " +
                                std::to_string(loads.size()) + " and " +
                                std::to_string(link_rows.size()) + "; pass those of the plan");
  }
  const magi::Homes homes = homes_from(layout, keys);
  const std::vector<magi::Slice> given = slices_from(slices);
  const std::span tiles(loads.data(), static_cast<size_t>(loads.size()));
  const std::span on_link(link_rows.data(), static_cast<size_t>(link_rows.size()));
  std::vector<magi::RankWork> work;
  {
    py::gil_scoped_release nogil;
    work = magi::rank_work(given, homes, tiles, on_link);
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

Int64Array rows_on_link(const OwnedLayout& layout, const Int32Array& transfers,
                        const magi::StageCosts& costs, int64_t ranks_per_node) {
  const std::vector<int64_t> rows =
      magi::rows_on_link(transfers_from(transfers), layout->cp_size, costs,
                         nodes_from(ranks_per_node, layout->cp_size));
  return longs_to(rows);
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

// Global rows in buffer order, with their places in the buffer.
std::vector<magi::Placed> placed_from(const Int32Array& ranges) {
  std::vector<magi::Placed> placed;
  int64_t at = 0;
  for (const magi::Range& rows : ranges_from(ranges)) {
    placed.push_back({rows, at});
    at += rows.size();
  }
  return placed;
}

Int32Array stage_slices(const OwnedLayout& layout, const Int32Array& slices, int32_t rank,
                        const Int32Array& key_ranges,
                        const std::optional<Int32Array>& query_ranges) {
  const std::vector<magi::Slice> given = slices_from(slices);
  const std::vector<magi::Placed> buffer = placed_from(key_ranges);
  std::vector<magi::Placed> queries = magi::local_runs(*layout, rank);
  if (query_ranges) queries = magi::within(queries, ranges_from(*query_ranges));
  std::vector<magi::Slice> local;
  {
    py::gil_scoped_release nogil;
    local = magi::local_slices(given, queries, buffer);
  }
  return slices_to(local);
}

// The mask in rows of two buffers, whose global rows are given in buffer order.
Int32Array buffer_slices(const Int32Array& slices, const Int32Array& query_ranges,
                         const Int32Array& key_ranges) {
  std::vector<magi::Placed> queries = placed_from(query_ranges);
  std::ranges::sort(queries, {}, [](const magi::Placed& p) { return p.rows.start; });
  return slices_to(magi::local_slices(slices_from(slices), queries, placed_from(key_ranges)));
}

// int64 [cp_size, cp_size]: visible cells by the query's rank and the key's.
Int64Array pair_areas(const OwnedLayout& layout, const Int32Array& slices,
                      const OwnedLayout* keys) {
  const std::vector<int64_t> areas =
      magi::pair_areas(slices_from(slices), homes_from(layout, keys));
  const py::ssize_t size = static_cast<py::ssize_t>(layout->cp_size);
  Int64Array out({size, size});
  std::ranges::copy(areas, out.mutable_data());
  return out;
}

py::tuple split_rows(const OwnedLayout& layout, const Int32Array& slices, int32_t rank,
                     const OwnedLayout* keys) {
  const std::vector<magi::Range> waiting =
      magi::remote_rows(slices_from(slices), homes_from(layout, keys), rank);
  return py::make_tuple(ranges_to(magi::other_rows(waiting, *layout, rank)), ranges_to(waiting));
}

}  // namespace

void bind_layout(py::module_& m) {
  py::class_<OwnedLayout>(m, "Layout", "Who owns which rows (planner/layout.h); checked.")
      .def(py::init<int64_t, int64_t, int64_t, Int32Array>(), py::arg("total_seqlen"),
           py::arg("chunk_size"), py::arg("cp_size"), py::arg("chunk_ranks"))
      .def("solve_transfers", &solve_transfers, py::arg("slices"), py::arg("tile_q"),
           py::arg("tile_k"), py::arg("degree"), py::arg("forward"), py::arg("costs"),
           py::arg("ranks_per_node") = 0, py::arg("keys") = py::none(),
           py::arg("by_queries") = py::none(),
           "Degree, forward mode, transfers and loads (planner/transfers.h).")
      .def("rows_on_link", &rows_on_link, py::arg("transfers"), py::arg("costs"),
           py::arg("ranks_per_node") = 0, "Rows that the model of times counts, by rank.")
      .def("pair_areas", &pair_areas, py::arg("slices"), py::arg("keys") = py::none(),
           "Visible cells by the query's rank and the key's.")
      .def("rank_work", &rank_work, py::arg("slices"), py::arg("loads"), py::arg("link_rows"),
           py::arg("keys") = py::none(),
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
           py::arg("keys") = py::none(), "Own rows that see own keys only, and the others.");
  m.def("buffer_slices", &buffer_slices, py::arg("slices"), py::arg("query_ranges"),
        py::arg("key_ranges"), "The mask in rows of a buffer of queries and of one of keys.");
  m.def("crossing_leg", &crossing_leg, py::arg("transfers"), py::arg("ranks_per_node"),
        "The transfers between nodes, each row once for each node (planner/nodes.h).");
}
