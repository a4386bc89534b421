#include "../forward/run.cuh"

namespace magi {
const FwdVariant kFwdFp16D64M192N128 = fwd_variant<FwdTraits<ptx::fp16, 64, 192, 128>>();
}  // namespace magi
