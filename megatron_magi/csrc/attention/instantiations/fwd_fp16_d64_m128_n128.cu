#include "../forward/run.cuh"

namespace magi {
MAGI_DEFINE_FWD(kFwdFp16D64M128N128, ptx::fp16, 64, 64, 128, 128);
}  // namespace magi
