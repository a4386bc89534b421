#include "../forward/run.cuh"

namespace magi {
MAGI_DEFINE_FWD(kFwdFp16D96M128N128, ptx::fp16, 96, 96, 128, 128);
}  // namespace magi
