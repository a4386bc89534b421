#include "../forward/run.cuh"

namespace magi {
MAGI_DEFINE_FWD(kFwdBf16D64M128N128, ptx::bf16, 64, 64, 128, 128);
}  // namespace magi
