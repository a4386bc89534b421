#include "../fwd/fwd_run.cuh"

namespace magi {
Status run_fwd_fp16_d64_m128_n128(const MagiFwdParams& args) {
  return run_fwd<FwdTraits<ptx::fp16, 64, 128, 128>>(args);
}
}  // namespace magi
