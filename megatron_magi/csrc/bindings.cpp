// The Python names of the solver: m.def lines and the conversions between numpy and spans.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "solver/hash.h"
#include "solver/slices.h"

namespace py = pybind11;

namespace {

// No forcecast: an int64 array would be wrapped to int32 silently; here it is a TypeError.
using Int32Array = py::array_t<int32_t, py::array::c_style>;

std::vector<magi::Slice> slices_from(const Int32Array& rows) {
  if (rows.ndim() != 2 || rows.shape(1) != 6) {
    throw std::invalid_argument(
        "slices must be int32 [N, 6] (q_start, q_end, k_start, k_end, d_lo, d_hi), got ndim " +
        std::to_string(rows.ndim()) + "; stack one row of six ints per slice");
  }
  const auto view = rows.unchecked<2>();
  std::vector<magi::Slice> slices(static_cast<size_t>(view.shape(0)));
  for (py::ssize_t i = 0; i < view.shape(0); ++i) {
    slices[i] = {view(i, 0), view(i, 1), view(i, 2), view(i, 3), view(i, 4), view(i, 5)};
  }
  return slices;
}

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

}  // namespace

PYBIND11_MODULE(_solver, m) {
  m.doc() = "Host solver of megatron_magi: slices, planning, work lists. No torch, no CUDA.";
  m.def("canonical_slices", &canonical_slices, py::arg("slices"));
  m.def("slice_areas", &slice_areas, py::arg("slices"));
  m.def("cut_slices", &cut_slices, py::arg("slices"), py::arg("q_start"), py::arg("q_end"),
        py::arg("k_start"), py::arg("k_end"));
  m.def("find_overlap", &find_overlap, py::arg("slices"));
  m.def("hash64", &hash64, py::arg("data"), py::arg("seed") = 0);
}
