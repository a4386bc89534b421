#include "../fwd/fwd_run.cuh"

namespace magi {
Status run_fwd_bf16_d128_n128_c2(const MagiFwdParams& args) {
  return run_fwd<FwdTraits<ptx::bf16, 128, 128, 2>>(args);
}
}  // namespace magi
