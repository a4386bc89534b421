#include "../forward/run.cuh"

namespace magi {
const FwdVariant kFwdBf16D64M128N128 = fwd_variant<FwdTraits<ptx::bf16, 64, 128, 128>>();
}  // namespace magi
