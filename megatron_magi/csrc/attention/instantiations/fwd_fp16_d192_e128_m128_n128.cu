#include "../forward/run.cuh"

namespace magi {
MAGI_DEFINE_FWD(kFwdFp16D192E128M128N128, ptx::fp16, 192, 128, 128, 128);
}  // namespace magi
