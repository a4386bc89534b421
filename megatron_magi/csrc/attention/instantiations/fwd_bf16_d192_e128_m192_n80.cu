#include "../forward/run.cuh"

namespace magi {
MAGI_DEFINE_FWD(kFwdBf16D192E128M192N80, ptx::bf16, 192, 128, 192, 80);
}  // namespace magi
