// The C ABI of the library: extern "C" functions of plain structs. Each returns 0 or a StatusCode
// and writes a message of at most message_bytes - 1 characters.
#include <cstdio>

#include "backward/launch.h"
#include "device/kernel_list.h"
#include "device/status.h"
#include "forward/launch.h"
#include "params.h"
#include "rows/launch.h"

namespace {

constexpr int kAbiVersion = 6;

int report(const magi::Status& status, char* message, int message_bytes) {
  if (message != nullptr && message_bytes > 0)
    std::snprintf(message, message_bytes, "%s", status.message.c_str());
  return status.code;
}

}  // namespace

#define MAGI_EXPORT extern "C" __attribute__((visibility("default")))

MAGI_EXPORT int magi_abi_version() {
  return kAbiVersion;
}

MAGI_EXPORT int magi_fwd_params_bytes() {
  return sizeof(MagiFwdParams);
}

MAGI_EXPORT int magi_attn_fwd(const MagiFwdParams* params, char* message, int message_bytes) {
  return report(magi::launch_fwd(*params), message, message_bytes);
}

MAGI_EXPORT int magi_bwd_params_bytes() {
  return sizeof(MagiBwdParams);
}

MAGI_EXPORT int magi_delta_params_bytes() {
  return sizeof(MagiDeltaParams);
}

MAGI_EXPORT int magi_attn_bwd(const MagiBwdParams* params, char* message, int message_bytes) {
  return report(magi::launch_bwd(*params), message, message_bytes);
}

MAGI_EXPORT int magi_row_delta(const MagiDeltaParams* params, char* message, int message_bytes) {
  return report(magi::launch_delta(*params), message, message_bytes);
}

MAGI_EXPORT int magi_row_params_bytes() {
  return sizeof(MagiGatherParams) + sizeof(MagiAddParams);
}

MAGI_EXPORT int magi_gather_rows(const MagiGatherParams* params, char* message, int message_bytes) {
  return report(magi::launch_gather_rows(*params), message, message_bytes);
}

MAGI_EXPORT int magi_add_rows(const MagiAddParams* params, char* message, int message_bytes) {
  return report(magi::launch_add_rows(*params), message, message_bytes);
}

MAGI_EXPORT int magi_pause(uint64_t nanoseconds, void* stream) {
  return magi::launch_pause(nanoseconds, stream).code;
}

// All kernels of the library, whatever their dtype.
MAGI_EXPORT int magi_num_kernels() {
  return static_cast<int>(magi::all_kernels().size());
}

// Loads what a model of this MagiDtype launches onto the current device; *num_loaded: how many.
MAGI_EXPORT int magi_load_kernels(int32_t dtype, int32_t* num_loaded, char* message,
                                  int message_bytes) {
  return report(magi::load_kernels(dtype, num_loaded), message, message_bytes);
}
