// The parts of the Python module; each file binds what it is named after.
#pragma once
#include <pybind11/pybind11.h>

void bind_slices(pybind11::module_& m);  // bindings_slices.cpp
void bind_stages(pybind11::module_& m);  // bindings_stages.cpp
void bind_layout(pybind11::module_& m);  // bindings_layout.cpp
void bind_kernel(pybind11::module_& m);  // bindings_kernel.cpp
void bind_call(pybind11::module_& m);    // bindings_call.cpp
