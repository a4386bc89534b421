// The compiled forward variants: one function per (element, head_dim, block_m, block_n), each in
// its own instantiation file so that they build in parallel.
#pragma once
#include "../common/status.h"
#include "../params.h"

namespace magi {

using FwdFunction = Status (*)(const MagiFwdParams&);

Status run_fwd_bf16_d64_m128_n128(const MagiFwdParams& args);
Status run_fwd_bf16_d64_m192_n128(const MagiFwdParams& args);
Status run_fwd_bf16_d128_m128_n128(const MagiFwdParams& args);
Status run_fwd_bf16_d128_m192_n64(const MagiFwdParams& args);
Status run_fwd_bf16_d128_m192_n80(const MagiFwdParams& args);
Status run_fwd_fp16_d64_m128_n128(const MagiFwdParams& args);
Status run_fwd_fp16_d64_m192_n128(const MagiFwdParams& args);
Status run_fwd_fp16_d128_m128_n128(const MagiFwdParams& args);
Status run_fwd_fp16_d128_m192_n64(const MagiFwdParams& args);
Status run_fwd_fp16_d128_m192_n80(const MagiFwdParams& args);

}  // namespace magi
