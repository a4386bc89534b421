#include "../forward/run.cuh"

namespace magi {
MAGI_DEFINE_FWD(kFwdFp16D256M128N80, ptx::fp16, 256, 256, 128, 80);
}  // namespace magi
