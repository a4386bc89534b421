#include "../forward/run.cuh"

namespace magi {
MAGI_DEFINE_FWD(kFwdFp16D64M192N128, ptx::fp16, 64, 64, 192, 128);
}  // namespace magi
