#include "../forward/run.cuh"

namespace magi {
const FwdVariant kFwdFp16D128M128N128 = fwd_variant<FwdTraits<ptx::fp16, 128, 128, 128>>();
}  // namespace magi
