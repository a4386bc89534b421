// The heads of a launch, forward or backward.
#pragma once

#include <cstdint>

namespace magi {

struct LaunchHeads {
  int64_t heads_q = 1;
  int64_t heads_kv = 1;
  int64_t head_dim = 128;  // of queries and keys
};

}  // namespace magi
