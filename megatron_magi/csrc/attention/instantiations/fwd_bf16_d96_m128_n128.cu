#include "../forward/run.cuh"

namespace magi {
MAGI_DEFINE_FWD(kFwdBf16D96M128N128, ptx::bf16, 96, 96, 128, 128);
}  // namespace magi
