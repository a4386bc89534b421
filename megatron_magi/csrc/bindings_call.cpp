// A function of a C library, called with a struct of which a few fields differ from call to call.
// From Python this takes a fifth of the time of making the struct by `struct` and calling ctypes,
// and every launch of attention pays it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <structmember.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"

namespace py = pybind11;

namespace {

constexpr size_t kMostBytes = 2048;  // of a struct
constexpr int kMessageBytes = 512;

// Reads a struct, and returns 0, or a code after it has written a message.
using Function = int (*)(const void* params, char* message, int message_bytes);

struct Field {
  size_t offset;
  char kind;  // of Python's module struct: P, l, q, Q, i, I or f
};

struct Call {
  std::string name;
  Function function;
  py::object error;
  std::string bytes;
  std::vector<Field> fields;
};

struct PreparedCall {
  PyObject_HEAD vectorcallfunc vectorcall;
  Call* call;
};

size_t size_of(char kind) {
  if (kind == 'P' || kind == 'l' || kind == 'q' || kind == 'Q') return 8;
  if (kind == 'i' || kind == 'I' || kind == 'f') return 4;
  throw std::invalid_argument(std::string("a field must be one of P, l, q, Q, i, I and f, got ") +
                              kind);
}

template <class T>
bool put(T value, char* to) {
  std::memcpy(to, &value, sizeof value);
  return true;
}

template <class T, class Wide>
bool put_narrow(Wide value, char* to) {
  if (value >= std::numeric_limits<T>::min() && value <= std::numeric_limits<T>::max())
    return put(static_cast<T>(value), to);
  PyErr_Format(PyExc_OverflowError, "a value of a 32-bit field must fit into it");
  return false;
}

bool put_float(double value, char* to) {
  const auto narrow = static_cast<float>(value);
  if (!std::isinf(narrow) || std::isinf(value)) return put(narrow, to);
  PyErr_Format(PyExc_OverflowError, "a value of a 32-bit field must fit into it");
  return false;
}

// False: with an exception.
bool put_value(char kind, PyObject* value, char* to) {
  if (kind == 'f') {
    const double number = PyFloat_AsDouble(value);
    if (number == -1.0 && PyErr_Occurred()) return false;
    return put_float(number, to);
  }
  if (kind == 'l' || kind == 'q' || kind == 'i') {
    const long long number = PyLong_AsLongLong(value);
    if (number == -1 && PyErr_Occurred()) return false;
    return kind == 'i' ? put_narrow<int32_t>(number, to) : put<int64_t>(number, to);
  }
  const unsigned long long number = PyLong_AsUnsignedLongLong(value);
  if (number == static_cast<unsigned long long>(-1) && PyErr_Occurred()) return false;
  return kind == 'I' ? put_narrow<uint32_t>(number, to) : put<uint64_t>(number, to);
}

// The interpreter's lock is free during the call. A launch takes microseconds, but where the device
// is a thousand launches behind it waits, and other threads watch what it waits for.
PyObject* call_prepared(PyObject* self, PyObject* const* values, size_t flags, PyObject* names) {
  const Call& call = *reinterpret_cast<PreparedCall*>(self)->call;
  const auto count = static_cast<size_t>(PyVectorcall_NARGS(flags));
  if (count != call.fields.size() || (names != nullptr && PyTuple_GET_SIZE(names) > 0))
    return PyErr_Format(PyExc_TypeError, "%zu positional values are required, got %zu",
                        call.fields.size(), count);
  alignas(16) char params[kMostBytes];
  std::memcpy(params, call.bytes.data(), call.bytes.size());
  for (size_t i = 0; i < count; ++i)
    if (!put_value(call.fields[i].kind, values[i], params + call.fields[i].offset)) return nullptr;
  char message[kMessageBytes];
  message[0] = 0;
  PyThreadState* const state = PyEval_SaveThread();
  const int code = call.function(params, message, kMessageBytes);
  PyEval_RestoreThread(state);
  if (code == 0) Py_RETURN_NONE;
  return PyErr_Format(call.error.ptr(), "%s failed with code %d: %s", call.name.c_str(), code,
                      message);
}

void add_field(size_t offset, char kind, Call* call) {
  if (offset > call->bytes.size() || size_of(kind) > call->bytes.size() - offset)
    throw std::invalid_argument("a field must lie in the struct of " +
                                std::to_string(call->bytes.size()) + " bytes, got offset " +
                                std::to_string(offset));
  call->fields.push_back({offset, kind});
}

void destroy(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<PreparedCall*>(self)->call;
  type->tp_free(self);
  Py_DECREF(type);
}

PyTypeObject* prepared_call_type = nullptr;  // is made when the module is loaded

PyTypeObject* make_type() {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(PreparedCall, vectorcall), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
                                {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                {Py_tp_members, members},
                                {0, nullptr}};
  // An instance that Python makes itself would have no function.
  constexpr auto kFlags =
      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION;
  static PyType_Spec spec = {"megatron_magi._solver.PreparedCall", sizeof(PreparedCall), 0, kFlags,
                             slots};
  auto* const type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (type == nullptr) throw py::error_already_set();
  return type;
}

py::object prepared_call(std::string name, uintptr_t function, const py::bytes& params,
                         const std::vector<std::pair<size_t, char>>& fields, py::object error) {
  std::unique_ptr<Call> call(new Call{
      std::move(name), reinterpret_cast<Function>(function), std::move(error), params, {}});
  if (function == 0 || call->bytes.size() > kMostBytes)
    throw std::invalid_argument("a function and a struct of at most " + std::to_string(kMostBytes) +
                                " bytes are required");
  for (const auto& [offset, kind] : fields) add_field(offset, kind, call.get());
  auto* made = reinterpret_cast<PreparedCall*>(prepared_call_type->tp_alloc(prepared_call_type, 0));
  if (made == nullptr) throw py::error_already_set();
  made->vectorcall = call_prepared;
  made->call = call.release();
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(made));
}

}  // namespace

void bind_call(py::module_& m) {
  prepared_call_type = make_type();
  m.def("prepared_call", &prepared_call, py::arg("name"), py::arg("function"), py::arg("params"),
        py::arg("fields"), py::arg("error"),
        "What calls a C function with a struct; its arguments are the fields that differ.");
}
