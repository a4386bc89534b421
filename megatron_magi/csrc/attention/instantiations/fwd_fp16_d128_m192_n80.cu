#include "../forward/run.cuh"

namespace magi {
const FwdVariant kFwdFp16D128M192N80 = fwd_variant<FwdTraits<ptx::fp16, 128, 192, 80>>();
}  // namespace magi
