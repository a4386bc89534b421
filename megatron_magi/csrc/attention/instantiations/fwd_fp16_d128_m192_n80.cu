#include "../forward/run.cuh"

namespace magi {
MAGI_DEFINE_FWD(kFwdFp16D128M192N80, ptx::fp16, 128, 128, 192, 80);
}  // namespace magi
