// What a host does while one of its streams is captured into a CUDA graph.
#include "export.h"

namespace magi {
namespace {

// Waits for an event that was recorded outside the capture. The runtime forbids this by default,
// because such a wait may never end if the event is part of what is captured.
Status wait_outside_capture(void* event) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  MAGI_RETURN_IF_ERROR(cuda_status(cudaThreadExchangeStreamCaptureMode(&mode), "capture mode"));
  const cudaError_t error = cudaEventSynchronize(static_cast<cudaEvent_t>(event));
  MAGI_RETURN_IF_ERROR(cuda_status(cudaThreadExchangeStreamCaptureMode(&mode), "capture mode"));
  return cuda_status(error, "waiting for an upload");
}

}  // namespace
}  // namespace magi

MAGI_EXPORT int magi_wait_outside_capture(void* event) {
  return magi::wait_outside_capture(event).code;
}
