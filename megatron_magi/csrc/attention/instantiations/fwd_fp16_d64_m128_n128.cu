#include "../forward/run.cuh"

namespace magi {
const FwdVariant kFwdFp16D64M128N128 = fwd_variant<FwdTraits<ptx::fp16, 64, 128, 128>>();
}  // namespace magi
