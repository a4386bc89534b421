#include "../forward/run.cuh"

namespace magi {
MAGI_DEFINE_FWD(kFwdBf16D64M192N128, ptx::bf16, 64, 64, 192, 128);
}  // namespace magi
