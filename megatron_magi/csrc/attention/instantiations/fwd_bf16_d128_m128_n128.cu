#include "../forward/run.cuh"

namespace magi {
const FwdVariant kFwdBf16D128M128N128 = fwd_variant<FwdTraits<ptx::bf16, 128, 128, 128>>();
}  // namespace magi
