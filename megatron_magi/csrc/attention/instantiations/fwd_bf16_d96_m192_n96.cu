#include "../forward/run.cuh"

namespace magi {
MAGI_DEFINE_FWD(kFwdBf16D96M192N96, ptx::bf16, 96, 96, 192, 96);
}  // namespace magi
