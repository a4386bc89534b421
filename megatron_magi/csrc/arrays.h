// numpy arrays as the planner's values, for the files that bind it.
#pragma once
#include <pybind11/numpy.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "planner/slices.h"

// No forcecast: an int64 array would be wrapped to int32 silently; here it is a TypeError.
using Int32Array = pybind11::array_t<int32_t, pybind11::array::c_style>;
using Int64Array = pybind11::array_t<int64_t, pybind11::array::c_style>;

inline std::vector<magi::Slice> slices_from(const Int32Array& rows) {
  if (rows.ndim() != 2 || rows.shape(1) != 6) {
    throw std::invalid_argument(
        "slices must be int32 [N, 6] (q_start, q_end, k_start, k_end, d_lo, d_hi), got ndim " +
        std::to_string(rows.ndim()) + "; stack one row of six ints per slice");
  }
  const auto view = rows.unchecked<2>();
  std::vector<magi::Slice> slices(static_cast<size_t>(view.shape(0)));
  for (pybind11::ssize_t i = 0; i < view.shape(0); ++i) {
    slices[i] = {view(i, 0), view(i, 1), view(i, 2), view(i, 3), view(i, 4), view(i, 5)};
  }
  return slices;
}
