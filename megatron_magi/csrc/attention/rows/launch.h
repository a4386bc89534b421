// Host entries of the row kernels: check the parameters and launch.
#pragma once
#include "../device/status.h"
#include "params.h"

namespace magi {

Status launch_gather_rows(const MagiGatherParams& params);
Status launch_add_rows(const MagiAddParams& params);
// Lets time pass on a stream.
Status launch_pause(uint64_t nanoseconds, void* stream);

}  // namespace magi
