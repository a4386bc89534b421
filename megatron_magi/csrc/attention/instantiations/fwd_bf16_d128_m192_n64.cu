#include "../forward/run.cuh"

namespace magi {
MAGI_DEFINE_FWD(kFwdBf16D128M192N64, ptx::bf16, 128, 128, 192, 64);
}  // namespace magi
