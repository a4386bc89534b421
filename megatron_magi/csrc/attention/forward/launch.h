// Host entry of the forward: checks the parameters, encodes the tensor maps, picks the variant.
#pragma once
#include "../device/status.h"
#include "../params.h"

namespace magi {

Status launch_fwd(const MagiFwdParams& params);

}  // namespace magi
