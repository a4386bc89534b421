// The Python module: who computes which chunk, hashes, and the parts that bindings.h declares.
#include "bindings.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "arrays.h"
#include "planner/ceil_div.h"
#include "planner/chunking.h"
#include "planner/dispatch.h"
#include "planner/hash.h"
#include "planner/tile_costs.h"

namespace py = pybind11;

namespace {

uint64_t hash64(const py::bytes& data, uint64_t seed) {
  const std::string_view text = data;
  return magi::hash64(std::as_bytes(std::span(text.data(), text.size())), seed);
}

py::tuple solve_dispatch(const std::vector<std::pair<Int32Array, int64_t>>& masks,
                         int64_t num_local_tokens, int64_t cp_size, int64_t chunk_size,
                         int64_t tile_q, int64_t tile_k, int64_t max_imbalance_ppm,
                         int64_t swap_trials, int64_t ranks_per_node) {
  std::vector<magi::LayerMask> given;
  for (const auto& [slices, num_layers] : masks) {
    given.push_back({slices_from(slices), num_layers});
  }
  magi::Dispatch dispatch;
  {
    py::gil_scoped_release nogil;
    dispatch =
        magi::solve_dispatch({given, num_local_tokens, cp_size, optional_from(chunk_size), tile_q,
                              tile_k, max_imbalance_ppm, swap_trials, ranks_per_node});
  }
  return py::make_tuple(dispatch.chunk_size, ints_to(dispatch.chunk_ranks));
}

Int32Array dispatch_by_load(const Int32Array& slices, int64_t chunk_size, int64_t num_chunks,
                            int64_t cp_size, int64_t tile_q, int64_t tile_k) {
  const std::vector<int64_t> tiles =
      magi::tile_loads(slices_from(slices), chunk_size, num_chunks, tile_q, tile_k);
  const std::vector<int64_t> loads = magi::sum_groups(tiles, magi::ceil_div(chunk_size, tile_q));
  return ints_to(magi::dispatch_lpt(loads, cp_size));
}

}  // namespace

PYBIND11_MODULE(_solver, m) {
  m.doc() = "Host side of megatron_magi: slices, planning, work lists. No torch, no CUDA.";
  bind_slices(m);
  m.def("solve_dispatch", &solve_dispatch, py::arg("masks"), py::arg("num_local_tokens"),
        py::arg("cp_size"), py::arg("chunk_size"), py::arg("tile_q"), py::arg("tile_k"),
        py::arg("max_imbalance_ppm"), py::arg("swap_trials"), py::arg("ranks_per_node") = 0,
        "Chunk size and the chunks' ranks (planner/chunking.h).");
  m.def("dispatch_by_load", &dispatch_by_load, py::arg("slices"), py::arg("chunk_size"),
        py::arg("num_chunks"), py::arg("cp_size"), py::arg("tile_q"), py::arg("tile_k"),
        "The chunks' ranks by their tiles alone, the largest first.");
  m.def("hash64", &hash64, py::arg("data"), py::arg("seed") = 0);
  bind_stages(m);
  bind_layout(m);
  bind_kernel(m);
  bind_call(m);
}
