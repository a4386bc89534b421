#include "../fwd/fwd_run.cuh"

namespace magi {
Status run_fwd_bf16_d64_m128_n128(const MagiFwdParams& args) {
  return run_fwd<FwdTraits<ptx::bf16, 64, 128, 128>>(args);
}
}  // namespace magi
