// The compiled forward variants: one per (element, head_dim, value_dim, block_m, block_n), without
// and with the largest logits, each in its own instantiation file so that they build in parallel.
#pragma once
#include "../device/kernel_list.h"
#include "../device/status.h"
#include "../params.h"

namespace magi {

struct FwdVariant {
  int dtype, head_dim, value_dim, block_m, block_n;
  bool max_logits;
  Status (*run)(const MagiFwdParams&);
  Kernel (*kernel)();
};

extern const FwdVariant kFwdBf16D64M128N128[2];
extern const FwdVariant kFwdBf16D64M192N128[2];
extern const FwdVariant kFwdBf16D128M128N128[2];
extern const FwdVariant kFwdBf16D128M192N64[2];
extern const FwdVariant kFwdBf16D128M192N80[2];
extern const FwdVariant kFwdBf16D192E128M128N128[2];
extern const FwdVariant kFwdBf16D192E128M192N80[2];
extern const FwdVariant kFwdBf16D256M128N80[2];
extern const FwdVariant kFwdFp16D64M128N128[2];
extern const FwdVariant kFwdFp16D64M192N128[2];
extern const FwdVariant kFwdFp16D128M128N128[2];
extern const FwdVariant kFwdFp16D128M192N64[2];
extern const FwdVariant kFwdFp16D128M192N80[2];
extern const FwdVariant kFwdFp16D192E128M128N128[2];
extern const FwdVariant kFwdFp16D192E128M192N80[2];
extern const FwdVariant kFwdFp16D256M128N80[2];

}  // namespace magi
