// Python names of the model of stage times (planner/stages.h).
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "planner/stages.h"

namespace py = pybind11;

namespace {

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

}  // namespace

void bind_stages(py::module_& m) {
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
}
