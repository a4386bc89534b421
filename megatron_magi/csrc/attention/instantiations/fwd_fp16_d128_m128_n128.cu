#include "../forward/run.cuh"

namespace magi {
MAGI_DEFINE_FWD(kFwdFp16D128M128N128, ptx::fp16, 128, 128, 128, 128);
}  // namespace magi
