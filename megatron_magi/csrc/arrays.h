// numpy arrays as the planner's values and back, for the files that bind it.
#pragma once
#include <pybind11/numpy.h>

#include <optional>
#include <vector>

#include "planner/slices.h"
#include "planner/transfers.h"

// No forcecast: an int64 array would be wrapped to int32 silently; here it is a TypeError.
using Int32Array = pybind11::array_t<int32_t, pybind11::array::c_style>;
using Int64Array = pybind11::array_t<int64_t, pybind11::array::c_style>;
using BoolArray = pybind11::array_t<bool, pybind11::array::c_style>;

// int32 [N, 6]: q_start, q_end, k_start, k_end, d_lo, d_hi.
std::vector<magi::Slice> slices_from(const Int32Array& rows);
Int32Array slices_to(const std::vector<magi::Slice>& slices);

// int32 [N, 2]: start, end.
std::vector<magi::Range> ranges_from(const Int32Array& rows);
Int32Array ranges_to(const std::vector<magi::Range>& ranges);

// int32 [M, 5]: stage, dst, src, start, end.
std::vector<magi::Transfer> transfers_from(const Int32Array& rows);
Int32Array transfers_to(const std::vector<magi::Transfer>& transfers);

Int32Array ints_to(const std::vector<int32_t>& values);
Int64Array longs_to(const std::vector<int64_t>& values);

// A number for which Python passes a negative one where there is none.
std::optional<int64_t> optional_from(int64_t value);
