// The C ABI of the library: extern "C" functions of plain structs. Each returns 0 or a StatusCode
// and writes a message of at most message_bytes - 1 characters.
#include <cstdio>

#include "common/status.h"
#include "fwd/fwd_launch.h"
#include "params.h"

namespace {

constexpr int kAbiVersion = 4;

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

MAGI_EXPORT int magi_flex_attn_fwd(const MagiFwdParams* params, char* message, int message_bytes) {
  return report(magi::launch_fwd(*params), message, message_bytes);
}
