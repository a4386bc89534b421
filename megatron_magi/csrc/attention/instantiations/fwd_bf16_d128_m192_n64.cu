#include "../forward/run.cuh"

namespace magi {
const FwdVariant kFwdBf16D128M192N64 = fwd_variant<FwdTraits<ptx::bf16, 128, 192, 64>>();
}  // namespace magi
