// Functions of the C ABI: plain structs in, 0 or a StatusCode out, and a message of at most
// message_bytes - 1 characters. Each is in the file of its launch.
#pragma once
#include <cstdio>

#include "status.h"

#define MAGI_EXPORT extern "C" __attribute__((visibility("default")))

namespace magi {

inline int report(const Status& status, char* message, int message_bytes) {
  if (message != nullptr && message_bytes > 0)
    std::snprintf(message, message_bytes, "%s", status.message.c_str());
  return status.code;
}

}  // namespace magi
