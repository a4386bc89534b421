// Host entry of the forward: checks the parameters and picks the variant.
#include <cstdint>
#include <string>

#include "../device/export.h"
#include "../widths.h"
#include "variants.h"

namespace magi {
namespace {

// The instances that are launched, and loaded early.
const FwdInstance* const kVariants[] = {
    kFwdBf16D64M128N128,     kFwdBf16D64M192N128,      kFwdBf16D96M128N128,
    kFwdBf16D96M192N96,      kFwdBf16D128M128N128,     kFwdBf16D128M192N64,
    kFwdBf16D128M192N80,     kFwdBf16D192E128M128N128, kFwdBf16D192E128M192N80,
    kFwdBf16D256M128N80,     kFwdFp16D64M128N128,      kFwdFp16D64M192N128,
    kFwdFp16D96M128N128,     kFwdFp16D96M192N96,       kFwdFp16D128M128N128,
    kFwdFp16D128M192N64,     kFwdFp16D128M192N80,      kFwdFp16D192E128M128N128,
    kFwdFp16D192E128M192N80, kFwdFp16D256M128N80,
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
  if (p.merge && p.out_dtype != kMagiFp32)
    return bad("merging continues from an fp32 output; pass out_dtype fp32");
  if (p.merge && p.sink_lse != nullptr)
    return bad("a sink joins the first of several results that merge; pass sink_lse null");
  if (p.out_dtype != kMagiFp32 && p.out_dtype != p.dtype)
    return bad("out_dtype must be the input dtype or fp32");
  if (!(p.softcap >= 0.f))
    return bad("softcap must be 0 (off) or above, got " + std::to_string(p.softcap));
  if (p.num_sms <= 0 || p.heads_per_section <= 0)
    return bad("num_sms and heads_per_section must be positive");
  if (static_cast<int64_t>(p.num_tiles) * p.num_heads_q > INT32_MAX / 2)
    return bad("too many query tiles x heads for 32-bit item numbers");
  return {};
}

Status launch_fwd(const MagiFwdParams& params) {
  MAGI_RETURN_IF_ERROR(check(params));
  if (params.num_q == 0) return {};
  const FwdKind kind = params.softcap != 0.f          ? kCapped
                       : params.max_logits != nullptr ? kWithMaxLogits
                                                      : kPlain;
  for (const FwdInstance* tiles : kVariants) {
    const FwdInstance* v = tiles + kind;
    if (v->dtype == params.dtype && v->head_dim == params.head_dim &&
        v->value_dim == params.value_dim && v->block_m == params.block_m &&
        v->block_n == params.block_n)
      return v->run(params);
  }
  return {kUnsupported, "no forward kernel for dtype code " + std::to_string(params.dtype) +
                            ", head_dim " + std::to_string(params.head_dim) + ", value_dim " +
                            std::to_string(params.value_dim) + ", block_m " +
                            std::to_string(params.block_m) + ", block_n " +
                            std::to_string(params.block_n) +
                            "; compiled are bf16 and fp16, head_dim " + compiled_widths_text()};
}

}  // namespace

void list_fwd_kernels(KernelList* kernels) {
  for (const FwdInstance* tiles : kVariants)
    for (const FwdInstance* v = tiles; v < tiles + kNumFwdKinds; ++v)
      kernels->push_back(v->kernel());
}

}  // namespace magi

MAGI_EXPORT int magi_attn_fwd(const MagiFwdParams* params, char* message, int message_bytes) {
  return magi::report(magi::launch_fwd(*params), message, message_bytes);
}
