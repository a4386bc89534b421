// The backward functions of the C ABI; conventions as in api.cpp.
#include <cstdio>

#include "bwd/bwd_launch.h"

#define MAGI_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

int report(const magi::Status& status, char* message, int message_bytes) {
  if (message != nullptr && message_bytes > 0)
    std::snprintf(message, message_bytes, "%s", status.message.c_str());
  return status.code;
}

}  // namespace

MAGI_EXPORT int magi_bwd_params_bytes() {
  return sizeof(MagiBwdParams);
}

MAGI_EXPORT int magi_delta_params_bytes() {
  return sizeof(MagiDeltaParams);
}

MAGI_EXPORT int magi_flex_attn_bwd(const MagiBwdParams* params, char* message, int message_bytes) {
  return report(magi::launch_bwd(*params), message, message_bytes);
}

MAGI_EXPORT int magi_row_delta(const MagiDeltaParams* params, char* message, int message_bytes) {
  return report(magi::launch_delta(*params), message, message_bytes);
}
