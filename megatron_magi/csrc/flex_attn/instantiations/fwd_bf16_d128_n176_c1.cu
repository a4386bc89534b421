#include "../fwd/fwd_run.cuh"

namespace magi {
Status run_fwd_bf16_d128_n176_c1(const MagiFwdParams& args) {
  return run_fwd<FwdTraits<ptx::bf16, 128, 176, 1>>(args);
}
}  // namespace magi
