#include "../forward/run.cuh"

namespace magi {
MAGI_DEFINE_FWD(kFwdBf16D192E128M128N128, ptx::bf16, 192, 128, 128, 128);
}  // namespace magi
