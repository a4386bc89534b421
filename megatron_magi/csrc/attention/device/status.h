// Result of a host function of the library: code 0 is success; the message says what failed.
#pragma once
#include <cuda_runtime.h>

#include <string>

namespace magi {

enum StatusCode : int { kOk = 0, kInvalidArgument = 1, kUnsupported = 2, kCudaError = 3 };

struct Status {
  StatusCode code = kOk;
  std::string message;
  bool ok() const { return code == kOk; }
};

inline Status cuda_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  return {kCudaError, std::string(what) + ": " + cudaGetErrorString(error)};
}

}  // namespace magi

#define MAGI_RETURN_IF_ERROR(expr)     \
  do {                                 \
    ::magi::Status status_ = (expr);   \
    if (!status_.ok()) return status_; \
  } while (0)
