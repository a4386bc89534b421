#include "../fwd/fwd_run.cuh"

namespace magi {
Status run_fwd_bf16_d128_m192_n64(const MagiFwdParams& args) {
  return run_fwd<FwdTraits<ptx::bf16, 128, 192, 64>>(args);
}
}  // namespace magi
