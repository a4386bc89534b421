#include "../forward/run.cuh"

namespace magi {
MAGI_DEFINE_FWD(kFwdBf16D128M128N128, ptx::bf16, 128, 128, 128, 128);
}  // namespace magi
