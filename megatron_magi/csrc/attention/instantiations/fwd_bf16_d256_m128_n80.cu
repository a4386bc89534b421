#include "../forward/run.cuh"

namespace magi {
MAGI_DEFINE_FWD(kFwdBf16D256M128N80, ptx::bf16, 256, 256, 128, 80);
}  // namespace magi
