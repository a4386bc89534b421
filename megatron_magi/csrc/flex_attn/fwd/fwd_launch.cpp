#include "fwd_launch.h"

#include <cstdint>
#include <string>

#include "fwd_variants.h"

namespace magi {
namespace {

struct Variant {
  int dtype, head_dim, block_n, cluster;
  FwdFunction run;
};

constexpr Variant kVariants[] = {
    {kMagiBf16, 64, 128, 1, run_fwd_bf16_d64_n128_c1},
    {kMagiBf16, 128, 128, 1, run_fwd_bf16_d128_n128_c1},
    {kMagiBf16, 128, 128, 2, run_fwd_bf16_d128_n128_c2},
    {kMagiBf16, 128, 176, 1, run_fwd_bf16_d128_n176_c1},
    {kMagiBf16, 128, 176, 2, run_fwd_bf16_d128_n176_c2},
    {kMagiFp16, 64, 128, 1, run_fwd_fp16_d64_n128_c1},
    {kMagiFp16, 128, 128, 1, run_fwd_fp16_d128_n128_c1},
    {kMagiFp16, 128, 128, 2, run_fwd_fp16_d128_n128_c2},
    {kMagiFp16, 128, 176, 1, run_fwd_fp16_d128_n176_c1},
    {kMagiFp16, 128, 176, 2, run_fwd_fp16_d128_n176_c2},
};

Status check(const MagiFwdParams& p) {
  auto bad = [](const std::string& what) { return Status{kInvalidArgument, what}; };
  if (p.num_heads_kv <= 0 || p.num_heads_q % p.num_heads_kv != 0)
    return bad("num_heads_q must be a multiple of num_heads_kv, got " +
               std::to_string(p.num_heads_q) + " and " + std::to_string(p.num_heads_kv));
  const int group = p.num_heads_q / p.num_heads_kv;
  const bool power_of_two = (p.pack & (p.pack - 1)) == 0;
  if (p.pack <= 0 || p.pack > 64 || !power_of_two || group % p.pack != 0)
    return bad("pack must be a power of two up to 64 that divides the group size, got " +
               std::to_string(p.pack) + " for groups of " + std::to_string(group));
  if (p.cluster <= 0 || group / p.pack % p.cluster != 0)
    return bad("a cluster's blocks must share kv heads; got cluster " + std::to_string(p.cluster) +
               " for groups of " + std::to_string(group) + " with pack " + std::to_string(p.pack));
  if (p.merge && p.out_dtype != kMagiFp32)
    return bad("merging continues from an fp32 output; pass out_dtype fp32");
  if (p.out_dtype != kMagiFp32 && p.out_dtype != p.dtype)
    return bad("out_dtype must be the input dtype or fp32");
  if (p.num_sms <= 0 || p.heads_per_section <= 0)
    return bad("num_sms and heads_per_section must be positive");
  if (static_cast<int64_t>(p.num_tiles) * p.num_heads_q > INT32_MAX / 2)
    return bad("too many query tiles x heads for 32-bit item numbers");
  return {};
}

}  // namespace

Status launch_fwd(const MagiFwdParams& params) {
  MAGI_RETURN_IF_ERROR(check(params));
  if (params.num_q == 0) return {};
  for (const Variant& v : kVariants)
    if (v.dtype == params.dtype && v.head_dim == params.head_dim && v.block_n == params.block_n &&
        v.cluster == params.cluster)
      return v.run(params);
  return {kUnsupported, "no forward kernel for dtype code " + std::to_string(params.dtype) +
                            ", head_dim " + std::to_string(params.head_dim) + ", block_n " +
                            std::to_string(params.block_n) + ", cluster " +
                            std::to_string(params.cluster) +
                            "; compiled are bf16 and fp16, head_dim 64 and 128"};
}

}  // namespace magi
