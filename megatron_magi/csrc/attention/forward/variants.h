// The compiled forward variants: one per (element, head_dim, block_m, block_n), each in its own
// instantiation file so that they build in parallel.
#pragma once
#include "../device/kernel_list.h"
#include "../device/status.h"
#include "../params.h"

namespace magi {

struct FwdVariant {
  int dtype, head_dim, block_m, block_n;
  Status (*run)(const MagiFwdParams&);
  Kernel (*kernel)();
};

extern const FwdVariant kFwdBf16D64M128N128;
extern const FwdVariant kFwdBf16D64M192N128;
extern const FwdVariant kFwdBf16D128M128N128;
extern const FwdVariant kFwdBf16D128M192N64;
extern const FwdVariant kFwdBf16D128M192N80;
extern const FwdVariant kFwdFp16D64M128N128;
extern const FwdVariant kFwdFp16D64M192N128;
extern const FwdVariant kFwdFp16D128M128N128;
extern const FwdVariant kFwdFp16D128M192N64;
extern const FwdVariant kFwdFp16D128M192N80;

}  // namespace magi
