// The compiled forward variants: one function per (element, head_dim, block_n, cluster), each in its own
// instantiation file so that they build in parallel.
#pragma once
#include "../common/status.h"
#include "../params.h"

namespace magi {

using FwdFunction = Status (*)(const MagiFwdParams&);

Status run_fwd_bf16_d64_n128_c1(const MagiFwdParams& args);
Status run_fwd_bf16_d128_n128_c1(const MagiFwdParams& args);
Status run_fwd_bf16_d128_n128_c2(const MagiFwdParams& args);
Status run_fwd_bf16_d128_n176_c1(const MagiFwdParams& args);
Status run_fwd_bf16_d128_n176_c2(const MagiFwdParams& args);
Status run_fwd_fp16_d64_n128_c1(const MagiFwdParams& args);
Status run_fwd_fp16_d128_n128_c1(const MagiFwdParams& args);
Status run_fwd_fp16_d128_n128_c2(const MagiFwdParams& args);
Status run_fwd_fp16_d128_n176_c1(const MagiFwdParams& args);
Status run_fwd_fp16_d128_n176_c2(const MagiFwdParams& args);

}  // namespace magi
