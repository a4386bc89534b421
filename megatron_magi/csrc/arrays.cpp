#include "arrays.h"

#include <limits>
#include <stdexcept>
#include <string>

namespace py = pybind11;

namespace {

int32_t narrow(int64_t value) {
  if (value < std::numeric_limits<int32_t>::min() || value > std::numeric_limits<int32_t>::max()) {
    throw std::invalid_argument("positions must fit in int32, got " + std::to_string(value) +
                                "; split the sequence");
  }
  return static_cast<int32_t>(value);
}

}  // namespace

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

Int32Array ranges_to(const std::vector<magi::Range>& ranges) {
  Int32Array rows({static_cast<py::ssize_t>(ranges.size()), static_cast<py::ssize_t>(2)});
  int32_t* out = rows.mutable_data();
  for (const magi::Range& range : ranges) {
    *out++ = narrow(range.start);
    *out++ = narrow(range.end);
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

Int32Array ints_to(const std::vector<int32_t>& values) {
  return Int32Array(static_cast<py::ssize_t>(values.size()), values.data());
}

Int64Array longs_to(const std::vector<int64_t>& values) {
  return Int64Array(static_cast<py::ssize_t>(values.size()), values.data());
}

std::optional<int64_t> optional_from(int64_t value) {
  return value < 0 ? std::nullopt : std::optional<int64_t>(value);
}
