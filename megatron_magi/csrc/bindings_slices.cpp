// Python names of what is done to slices alone.
#include <pybind11/pybind11.h>

#include <optional>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "planner/slices.h"

namespace py = pybind11;

namespace {

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

}  // namespace

void bind_slices(py::module_& m) {
  m.def("canonical_slices", &canonical_slices, py::arg("slices"));
  m.def("slice_areas", &slice_areas, py::arg("slices"));
  m.def("cut_slices", &cut_slices, py::arg("slices"), py::arg("q_start"), py::arg("q_end"),
        py::arg("k_start"), py::arg("k_end"));
  m.def("find_overlap", &find_overlap, py::arg("slices"));
}
