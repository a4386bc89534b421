#include "../forward/run.cuh"

namespace magi {
MAGI_DEFINE_FWD(kFwdFp16D128M192N64, ptx::fp16, 128, 128, 192, 64);
}  // namespace magi
