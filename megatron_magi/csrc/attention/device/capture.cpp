// What a host does while one of its streams is captured into a CUDA graph.
#include <cstdint>

#include "export.h"

namespace magi {
namespace {

// Runs what the runtime forbids while any thread captures, because it might be part of it.
template <class Call>
cudaError_t outside_capture(const Call& call) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode);
  if (error != cudaSuccess) return error;
  const cudaError_t result = call();
  error = cudaThreadExchangeStreamCaptureMode(&mode);
  return error != cudaSuccess ? error : result;
}

}  // namespace
}  // namespace magi

// Waits for an event that was recorded outside a capture.
MAGI_EXPORT int magi_wait_outside_capture(void* event) {
  return magi::outside_capture(
      [&] { return cudaEventSynchronize(static_cast<cudaEvent_t>(event)); });
}

MAGI_EXPORT int magi_event_is_done(void* event, int32_t* is_done) {
  const cudaError_t result =
      magi::outside_capture([&] { return cudaEventQuery(static_cast<cudaEvent_t>(event)); });
  *is_done = result == cudaSuccess;
  return result == cudaErrorNotReady ? cudaSuccess : result;
}
