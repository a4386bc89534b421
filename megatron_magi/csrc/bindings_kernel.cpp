// Python names of the kernels' work lists: numpy in, numpy out, rows of int32 that go to the device
// as they are.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays.h"
#include "attention/backward/blocks.h"
#include "attention/widths.h"
#include "bindings.h"
#include "schedule/backward_bands.h"
#include "schedule/backward_choice.h"
#include "schedule/backward_turns.h"
#include "schedule/forward.h"
#include "schedule/forward_choice.h"

namespace py = pybind11;

namespace {

// A vector of structs of int32 as an int32 matrix, one struct a row.
template <class Row>
Int32Array rows_to(const std::vector<Row>& rows) {
  static_assert(sizeof(Row) % sizeof(int32_t) == 0, "work-list records are made of int32");
  Int32Array out({static_cast<py::ssize_t>(rows.size()),
                  static_cast<py::ssize_t>(sizeof(Row) / sizeof(int32_t))});
  if (!rows.empty()) std::memcpy(out.mutable_data(), rows.data(), rows.size() * sizeof(Row));
  return out;
}

// Counts that something is divided by or that must not be empty.
void require_positive(std::initializer_list<std::pair<const char*, int64_t>> counts) {
  for (const auto& [name, count] : counts)
    if (count < 1)
      throw std::invalid_argument(std::string(name) + " must be at least 1, got " +
                                  std::to_string(count));
}

// What the device reads of a forward, and what its variant is chosen by.
struct FwdArrays {
  Int32Array tiles, entries, empty_rows;
  int64_t steps, masked_steps, active_keys, num_parts;
};

FwdArrays arrays_of(const magi::FwdWorkList& list) {
  return {rows_to(list.tiles), rows_to(list.entries), rows_to(list.empty_rows).reshape({-1, 2}),
          list.steps,          list.masked_steps,     list.active_keys,
          list.num_parts};
}

using NamedCosts = std::map<std::string, double>;

template <class Costs, size_t n>
NamedCosts named(const std::pair<std::string_view, double Costs::*> (&fields)[n]) {
  NamedCosts found;
  for (const auto& [name, field] : fields) found[std::string(name)] = Costs{}.*field;
  return found;
}

template <class Costs, size_t n>
Costs costs_of(const NamedCosts& given, const std::string& type,
               const std::pair<std::string_view, double Costs::*> (&fields)[n]) {
  Costs costs;
  for (const auto& [name, value] : given) {
    const auto is_it = [&](const auto& field) { return field.first == name; };
    const auto field = std::ranges::find_if(fields, is_it);
    if (field == std::end(fields))
      throw std::invalid_argument("costs must be fields of " + type + ", got " + name);
    costs.*(field->second) = value;
  }
  return costs;
}

// A forward that may run: its kernel, its work list and the heads that it walks together.
struct FwdChosen {
  int64_t pack, block_m, block_n, heads_per_section;
  double cost;
  FwdArrays work;
};

FwdChosen chosen_of(const magi::FwdChoice& choice) {
  const magi::FwdVariant& v = choice.variant;
  return {
      v.pack, v.block_m, v.block_n, choice.heads_per_section, choice.cost, arrays_of(choice.work)};
}

FwdChosen choose_fwd(const Int32Array& rows, int64_t num_q, int64_t num_k, int64_t heads_q,
                     int64_t heads_kv, int64_t head_dim, int64_t num_sms) {
  require_positive({{"heads_q", heads_q}, {"heads_kv", heads_kv}, {"num_sms", num_sms}});
  const std::vector<magi::Slice> slices = slices_from(rows);
  magi::FwdChoice choice;
  {
    py::gil_scoped_release nogil;
    choice = magi::choose_fwd(slices, {num_q, num_k, {heads_q, heads_kv, head_dim}, num_sms});
  }
  return chosen_of(choice);
}

// What choose_fwd compares, from lists that are made once, with the present costs. Other costs
// apply to the choice alone: end_tile_cost and end_masked_cost change nothing here.
class FwdAlternatives {
 public:
  FwdAlternatives(const Int32Array& rows, std::pair<int64_t, int64_t> lengths,
                  std::array<int64_t, 3> heads, int64_t num_sms)
      : shape_{lengths.first, lengths.second, {heads[0], heads[1], heads[2]}, num_sms} {
    require_positive({{"heads_q", heads[0]}, {"heads_kv", heads[1]}, {"num_sms", num_sms}});
    variants_ = magi::fwd_variants(shape_.heads);
    const std::vector<magi::Slice> slices = slices_from(rows);
    for (const magi::FwdVariant& variant : variants_)
      lists_.push_back(magi::fwd_whole_list(slices, shape_, variant, magi::kFwdCosts));
  }

  std::vector<FwdChosen> choices(const NamedCosts& given) const {
    const auto costs = costs_of<magi::FwdCosts>(given, "FwdCosts", magi::kFwdCostFields);
    std::vector<FwdChosen> found;
    for (size_t i = 0; i < lists_.size(); ++i)
      for (const auto& choice : magi::fwd_choices(lists_[i], shape_, variants_[i], costs))
        found.push_back(chosen_of(choice));
    return found;
  }

 private:
  magi::FwdShape shape_;
  std::vector<magi::FwdVariant> variants_;
  std::vector<magi::FwdWorkList> lists_;  // of the variants
};

std::vector<std::pair<int64_t, int64_t>> compiled_widths() {
  std::vector<std::pair<int64_t, int64_t>> found;
  for (const magi::HeadWidths& widths : magi::kCompiledWidths)
    found.emplace_back(widths.head_dim, widths.value_dim);
  return found;
}

std::vector<std::tuple<int64_t, int64_t, int64_t>> fwd_variants(int64_t heads_q, int64_t heads_kv,
                                                                int64_t head_dim) {
  require_positive({{"heads_q", heads_q}, {"heads_kv", heads_kv}});
  std::vector<std::tuple<int64_t, int64_t, int64_t>> found;
  for (const magi::FwdVariant& v : magi::fwd_variants({heads_q, heads_kv, head_dim}))
    found.emplace_back(v.pack, v.block_m, v.block_n);
  return found;
}

FwdArrays fwd_work_list(const Int32Array& rows, int64_t num_q, int64_t num_k, int64_t tile_q,
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
  return arrays_of(list);
}

// What the device reads of a backward, and its schedule.
struct BwdArrays {
  Int32Array items, entries, segments, places, turns;
  int64_t num_tiles, num_row_groups, steps, partial_steps;
  int64_t num_splits, lanes_per_section, whole_heads, band_rows;
  bool in_turns, descending, heads_inner, grouped;
};

BwdArrays arrays_of(const magi::BwdChoice& choice) {
  const auto& [list, schedule] = choice;
  return {rows_to(list.items),
          rows_to(list.entries),
          rows_to(list.segments),
          rows_to(list.places),
          rows_to(list.turns),
          list.num_tiles,
          list.num_row_groups,
          list.steps,
          list.partial_steps,
          schedule.num_splits,
          schedule.lanes_per_section,
          schedule.whole_heads,
          schedule.band_rows,
          schedule.in_turns,
          list.descending,
          list.heads_inner,
          list.grouped};
}

BwdArrays choose_bwd(const Int32Array& rows, int64_t num_q, int64_t num_k, int64_t heads_q,
                     int64_t heads_kv, int64_t head_dim, int64_t num_sms, int64_t tile_q,
                     std::optional<int64_t> asked_tile_k, bool deterministic, bool may_take_turns) {
  const int64_t tile_k = asked_tile_k.value_or(magi::bwd_tile_k(static_cast<int>(head_dim)));
  require_positive({{"heads_q", heads_q},
                    {"heads_kv", heads_kv},
                    {"num_sms", num_sms},
                    {"tile_q", tile_q},
                    {"tile_k", tile_k}});
  const std::vector<magi::Slice> slices = slices_from(rows);
  magi::BwdTiling tiling;
  tiling.tile_q = tile_q;
  tiling.tile_k = tile_k;
  magi::BwdChoice choice;
  {
    py::gil_scoped_release nogil;
    choice = magi::choose_bwd(slices, {num_q, num_k}, {heads_q, heads_kv, head_dim}, num_sms,
                              tiling, {deterministic, may_take_turns});
  }
  return arrays_of(choice);
}

// Splits, lanes of a section, whether parts take turns, whole heads, rows of a band, time in steps.
using ScheduleRow = std::tuple<int64_t, int64_t, bool, int64_t, int64_t, double>;

// The schedules that choose_bwd compares, made for one list and asked for with any costs.
class BwdAlternatives {
 public:
  BwdAlternatives(const Int32Array& rows, std::pair<int64_t, int64_t> lengths,
                  std::array<int64_t, 3> heads, int64_t num_sms, bool deterministic,
                  bool may_take_turns)
      : mode_{deterministic, may_take_turns} {
    const auto [heads_q, heads_kv, head_dim] = heads;
    require_positive({{"heads_q", heads_q}, {"heads_kv", heads_kv}, {"num_sms", num_sms}});
    const magi::BwdLengths of_launch{lengths.first, lengths.second};
    magi::BwdTiling tiling;
    tiling.tile_k = magi::bwd_tile_k(static_cast<int>(head_dim));
    list_ = magi::build_bwd_work_list(slices_from(rows), of_launch, tiling, deterministic);
    shape_ = magi::bwd_shape(of_launch, {heads_q, heads_kv, head_dim}, num_sms);
  }

  std::pair<double, std::vector<ScheduleRow>> timed(const NamedCosts& costs) const {
    const auto with = costs_of<magi::BwdCosts>(costs, "BwdCosts", magi::kBwdCostFields);
    const auto [all, tolerance] = magi::bwd_schedules(list_, shape_, mode_, with);
    std::vector<ScheduleRow> found;
    for (const magi::BwdSchedule& s : all)
      found.emplace_back(s.num_splits, s.lanes_per_section, s.in_turns, s.whole_heads, s.band_rows,
                         s.makespan);
    return {tolerance, found};
  }

 private:
  magi::BwdMode mode_;
  magi::BwdWorkList list_;
  magi::BwdShape shape_;
};

template <class Row>
std::vector<Row> rows_from(const Int32Array& array) {
  std::vector<Row> rows(static_cast<size_t>(array.shape(0)));
  void* bytes = rows.data();
  if (!rows.empty()) std::memcpy(bytes, array.data(), rows.size() * sizeof(Row));
  return rows;
}

BwdArrays bwd_in_bands(BwdArrays arrays, int64_t rows, int64_t tile_q) {
  require_positive({{"rows", rows}, {"tile_q", tile_q}});
  magi::BwdWorkList list;
  list.items = rows_from<magi::BwdItem>(arrays.items);
  list.entries = rows_from<magi::BwdEntry>(arrays.entries);
  magi::cut_into_bands(list, rows, tile_q);
  arrays.items = rows_to(list.items);
  arrays.entries = rows_to(list.entries);
  return arrays;
}

// What a block of a launch works on, and which turn it takes at which sums.
struct BlockRow {
  int32_t item, kv_head, head_begin, heads, sums, turn, count, before;
};

Int32Array bwd_blocks(const BwdArrays& arrays, int64_t heads_q, int64_t heads_kv,
                      std::array<int64_t, 3> schedule) {
  require_positive({{"heads_q", heads_q}, {"heads_kv", heads_kv}, {"splits", schedule[0]}});
  const auto [splits, lanes, whole] = schedule;
  const auto items = rows_from<magi::BwdItem>(arrays.items);
  const auto narrow = [](int64_t n) { return static_cast<int32_t>(n); };
  const magi::BwdBlocks blocks{narrow(arrays.items.shape(0)), narrow(splits), narrow(lanes),
                               narrow(whole), narrow(heads_q / heads_kv / splits)};
  std::vector<BlockRow> rows;
  const int64_t count = arrays.items.shape(0) * (whole + (heads_kv - whole) * splits);
  for (int32_t block = 0; block < count; ++block) {
    const magi::BwdBlockWork work = blocks.work(block);
    const magi::BwdTurnOfPart part =
        blocks.turn(work, items[static_cast<size_t>(work.item_number)]);
    rows.push_back({work.item_number, work.kv_head, work.head_begin, work.heads, part.sums,
                    part.turn, part.count, part.before});
  }
  return rows_to(rows);
}

Int32Array bwd_visits(const BwdArrays& arrays) {
  magi::BwdWorkList list;
  list.items = rows_from<magi::BwdItem>(arrays.items);
  list.entries = rows_from<magi::BwdEntry>(arrays.entries);
  list.segments = rows_from<magi::BwdSegment>(arrays.segments);
  list.places = rows_from<magi::BwdPlace>(arrays.places);
  list.turns = rows_from<magi::BwdTurn>(arrays.turns);
  list.descending = arrays.descending;
  return rows_to(magi::visits_of(list));
}

}  // namespace

void bind_kernel(py::module_& m) {
  py::class_<FwdArrays>(m, "FwdWorkList", "A work list of the forward (schedule/forward.h).")
      .def_readonly("tiles", &FwdArrays::tiles)
      .def_readonly("entries", &FwdArrays::entries)
      .def_readonly("empty_rows", &FwdArrays::empty_rows)
      .def_readonly("steps", &FwdArrays::steps)
      .def_readonly("masked_steps", &FwdArrays::masked_steps)
      .def_readonly("active_keys", &FwdArrays::active_keys)
      .def_readonly("num_parts", &FwdArrays::num_parts);
  py::class_<BwdArrays>(m, "BwdWorkList", "A work list of the backward (schedule/backward.h).")
      .def_readonly("items", &BwdArrays::items)
      .def_readonly("entries", &BwdArrays::entries)
      .def_readonly("segments", &BwdArrays::segments)
      .def_readonly("places", &BwdArrays::places)
      .def_readonly("turns", &BwdArrays::turns)
      .def("visits", &bwd_visits,
           "The step of every item in walk order: first row group, the numbers that it and the "
           "next one wait for, what is signalled (attention/backward/visit.h).")
      .def("in_bands", &bwd_in_bands, py::arg("rows"), py::arg("tile_q") = magi::kBwdTileQ,
           "The list with its items cut into bands of rows (schedule/backward_bands.h).")
      .def("blocks", &bwd_blocks, py::arg("heads_q"), py::arg("heads_kv"), py::arg("schedule"),
           "Every block of a launch in this schedule (splits, lanes of a section, whole heads) "
           "whose parts take turns: item, kv head, first query head, query heads, number of its "
           "sums, turn, turns of the tile, turns before those (attention/backward/blocks.h).")
      .def_readonly("num_tiles", &BwdArrays::num_tiles)
      .def_readonly("num_row_groups", &BwdArrays::num_row_groups)
      .def_readonly("steps", &BwdArrays::steps)
      .def_readonly("partial_steps", &BwdArrays::partial_steps)
      .def_readonly("num_splits", &BwdArrays::num_splits)
      .def_readonly("lanes_per_section", &BwdArrays::lanes_per_section)
      .def_readonly("in_turns", &BwdArrays::in_turns)
      .def_readonly("whole_heads", &BwdArrays::whole_heads)
      .def_readonly("band_rows", &BwdArrays::band_rows)
      .def_readonly("descending", &BwdArrays::descending)
      .def_readonly("heads_inner", &BwdArrays::heads_inner)
      .def_readonly("grouped", &BwdArrays::grouped);
  py::class_<BwdAlternatives>(
      m, "BwdAlternatives", "Schedules that a backward is chosen from (schedule/backward_costs.h).")
      .def(py::init<const Int32Array&, std::pair<int64_t, int64_t>, std::array<int64_t, 3>, int64_t,
                    bool, bool>(),
           py::arg("slices"), py::arg("lengths"), py::arg("heads"), py::arg("num_sms"),
           py::arg("deterministic"), py::arg("may_take_turns"))
      .def("timed", &BwdAlternatives::timed, py::arg("costs"));
  m.def(
      "bwd_costs", [] { return named(magi::kBwdCostFields); },
      "The costs that backwards are chosen with, by name.");
  m.def(
      "fwd_costs", [] { return named(magi::kFwdCostFields); },
      "The costs that forwards are chosen with, by name.");
  py::class_<FwdChosen>(m, "FwdChoice", "A forward that may run (schedule/forward_choice.h).")
      .def_readonly("pack", &FwdChosen::pack)
      .def_readonly("block_m", &FwdChosen::block_m)
      .def_readonly("block_n", &FwdChosen::block_n)
      .def_readonly("heads_per_section", &FwdChosen::heads_per_section)
      .def_readonly("cost", &FwdChosen::cost)
      .def_readonly("work", &FwdChosen::work);
  py::class_<FwdAlternatives>(m, "FwdAlternatives",
                              "What a forward is chosen from (schedule/forward_costs.h).")
      .def(py::init<const Int32Array&, std::pair<int64_t, int64_t>, std::array<int64_t, 3>,
                    int64_t>(),
           py::arg("slices"), py::arg("lengths"), py::arg("heads"), py::arg("num_sms"))
      .def("choices", &FwdAlternatives::choices, py::arg("costs"));
  m.def("choose_fwd", &choose_fwd, py::arg("slices"), py::arg("num_q"), py::arg("num_k"),
        py::arg("heads_q"), py::arg("heads_kv"), py::arg("head_dim"), py::arg("num_sms"),
        "Kernel and work list of a forward (schedule/forward_choice.h).");
  m.def("compiled_widths", &compiled_widths);
  m.def("bwd_tile_k", &magi::bwd_tile_k, py::arg("head_dim"));
  m.def("fwd_variants", &fwd_variants, py::arg("heads_q"), py::arg("heads_kv"), py::arg("head_dim"),
        "(pack, block_m, block_n) of every forward kernel worth trying.");
  m.def("fwd_work_list", &fwd_work_list, py::arg("slices"), py::arg("num_q"), py::arg("num_k"),
        py::arg("tile_q") = 128, py::arg("tile_k") = 128, py::arg("max_steps") = 0,
        "Tiles, entries and empty rows of the forward (schedule/forward.h).");
  m.def("choose_bwd", &choose_bwd, py::arg("slices"), py::arg("num_q"), py::arg("num_k"),
        py::arg("heads_q") = 1, py::arg("heads_kv") = 1, py::arg("head_dim") = 128,
        py::arg("num_sms") = 132, py::arg("tile_q") = magi::kBwdTileQ,
        py::arg("tile_k") = py::none(), py::arg("deterministic") = false,
        py::arg("may_take_turns") = true,
        "Items, entries, turns and schedule of the backward (schedule/backward_choice.h). "
        "tile_k: keys of a tile; None: those of the kernel for this head_dim.");
}
