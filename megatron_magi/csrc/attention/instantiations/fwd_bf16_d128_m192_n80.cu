#include "../forward/run.cuh"

namespace magi {
const FwdVariant kFwdBf16D128M192N80 = fwd_variant<FwdTraits<ptx::bf16, 128, 192, 80>>();
}  // namespace magi
