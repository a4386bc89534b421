// Host entry of the backward: checks the parameters, encodes the tensor maps, picks the variant.
#pragma once
#include "../device/status.h"
#include "params.h"

namespace magi {

Status launch_bwd(const MagiBwdParams& params);
Status launch_delta(const MagiDeltaParams& params);

}  // namespace magi
