#include "../forward/run.cuh"

namespace magi {
const FwdVariant kFwdBf16D64M192N128 = fwd_variant<FwdTraits<ptx::bf16, 64, 192, 128>>();
}  // namespace magi
