#include "../forward/run.cuh"

namespace magi {
MAGI_DEFINE_FWD(kFwdFp16D96M192N96, ptx::fp16, 96, 96, 192, 96);
}  // namespace magi
