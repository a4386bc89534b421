// Python names of the kernels' work lists: numpy in, numpy out, rows of int32 that go to the device
// as they are.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "solver/bwd_schedule.h"
#include "solver/work_list_bwd.h"
#include "solver/work_list_fwd.h"

namespace py = pybind11;

namespace {

using Int32Array = py::array_t<int32_t, py::array::c_style>;

std::vector<magi::Slice> slices_from(const Int32Array& rows) {
  if (rows.ndim() != 2 || rows.shape(1) != 6) {
    throw std::invalid_argument("slices must be int32 [N, 6], got ndim " +
                                std::to_string(rows.ndim()) +
                                "; stack one row of six ints per slice");
  }
  const auto view = rows.unchecked<2>();
  std::vector<magi::Slice> slices(static_cast<size_t>(view.shape(0)));
  for (py::ssize_t i = 0; i < view.shape(0); ++i) {
    slices[i] = {view(i, 0), view(i, 1), view(i, 2), view(i, 3), view(i, 4), view(i, 5)};
  }
  return slices;
}

// A vector of structs of int32 as an int32 matrix, one struct a row.
template <class Row>
Int32Array rows_to(const std::vector<Row>& rows) {
  static_assert(sizeof(Row) % sizeof(int32_t) == 0, "work-list records are made of int32");
  Int32Array out({static_cast<py::ssize_t>(rows.size()),
                  static_cast<py::ssize_t>(sizeof(Row) / sizeof(int32_t))});
  if (!rows.empty()) std::memcpy(out.mutable_data(), rows.data(), rows.size() * sizeof(Row));
  return out;
}

py::dict fwd_work_list(const Int32Array& rows, int64_t num_q, int64_t num_k, int64_t tile_q,
                       int64_t tile_k, int64_t max_steps) {
  const std::vector<magi::Slice> slices = slices_from(rows);
  magi::FwdWorkList list;
  {
    py::gil_scoped_release nogil;
    magi::FwdTiling tiling;
    tiling.tile_q = tile_q;
    tiling.tile_k = tile_k;
    list = magi::build_fwd_work_list(slices, num_q, num_k, tiling);
    if (max_steps > 0) magi::split_long_walks(list, num_q, tile_k, max_steps);
  }
  py::dict out;
  out["tiles"] = rows_to(list.tiles);
  out["entries"] = rows_to(list.entries);
  out["empty_rows"] = rows_to(list.empty_rows).reshape({-1, 2});
  out["steps"] = list.steps;
  out["masked_steps"] = list.masked_steps;
  out["active_keys"] = list.active_keys;
  out["num_parts"] = list.num_parts;
  return out;
}

py::dict bwd_work_list(const Int32Array& rows, int64_t num_q, int64_t num_k, int64_t heads_q,
                       int64_t heads_kv, int64_t head_dim, int64_t num_sms, int64_t tile_q,
                       int64_t tile_k, bool deterministic) {
  const std::vector<magi::Slice> slices = slices_from(rows);
  magi::BwdWorkList list;
  magi::BwdSchedule schedule;
  {
    py::gil_scoped_release nogil;
    magi::BwdTiling tiling;
    tiling.tile_q = tile_q;
    tiling.tile_k = tile_k;
    list = magi::build_bwd_work_list(slices, num_q, num_k, tiling, deterministic);
    const int64_t head_bytes = num_q * head_dim * 8;  // Q, dO in 16 bits, dQ in 32
    schedule = magi::choose_bwd_schedule(list, heads_q / heads_kv, heads_kv, num_sms, head_bytes,
                                         num_q, deterministic);
  }
  py::dict out;
  out["items"] = rows_to(list.items);
  out["entries"] = rows_to(list.entries);
  out["visits"] = rows_to(list.visits);
  out["num_cells"] = list.num_cells;
  out["descending"] = list.descending;
  out["heads_inner"] = list.heads_inner;
  out["grouped"] = list.grouped;
  out["num_splits"] = schedule.num_splits;
  out["heads_per_section"] = schedule.heads_per_section;
  out["steps"] = list.steps;
  out["partial_steps"] = list.partial_steps;
  return out;
}

}  // namespace

void bind_kernel(py::module_& m) {
  m.def("fwd_work_list", &fwd_work_list, py::arg("slices"), py::arg("num_q"), py::arg("num_k"),
        py::arg("tile_q") = 128, py::arg("tile_k") = 128, py::arg("max_steps") = 0,
        "Tiles, entries and empty rows of the forward (solver/work_list_fwd.h).");
  m.def("bwd_work_list", &bwd_work_list, py::arg("slices"), py::arg("num_q"), py::arg("num_k"),
        py::arg("heads_q") = 1, py::arg("heads_kv") = 1, py::arg("head_dim") = 128,
        py::arg("num_sms") = 132, py::arg("tile_q") = 64, py::arg("tile_k") = 128,
        py::arg("deterministic") = false,
        "Items, entries, visits and schedule of the backward (solver/work_list_bwd.h).");
}
