// The exported functions for a host that waits while one of its streams is captured.
#include <cstdint>

#include "export.h"
#include "outside_capture.h"

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
