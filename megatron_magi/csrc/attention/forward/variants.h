// The compiled forward variants: one per (element, head_dim, value_dim, block_m, block_n) and kind,
// tiles in their own instantiation files so that they build in parallel.
#pragma once
#include "../device/kernel_list.h"
#include "../device/status.h"
#include "../params.h"

namespace magi {

// kCapped finds the largest logits too, if they are asked for.
enum FwdKind : int { kPlain = 0, kWithMaxLogits = 1, kCapped = 2 };
constexpr int kNumFwdKinds = 3;

struct FwdInstance {
  int dtype, head_dim, value_dim, block_m, block_n;
  Status (*run)(const MagiFwdParams&);
  Kernel (*kernel)();
};

extern const FwdInstance kFwdBf16D64M128N128[kNumFwdKinds];
extern const FwdInstance kFwdBf16D64M192N128[kNumFwdKinds];
extern const FwdInstance kFwdBf16D96M128N128[kNumFwdKinds];
extern const FwdInstance kFwdBf16D96M192N96[kNumFwdKinds];
extern const FwdInstance kFwdBf16D128M128N128[kNumFwdKinds];
extern const FwdInstance kFwdBf16D128M192N64[kNumFwdKinds];
extern const FwdInstance kFwdBf16D128M192N80[kNumFwdKinds];
extern const FwdInstance kFwdBf16D192E128M128N128[kNumFwdKinds];
extern const FwdInstance kFwdBf16D192E128M192N80[kNumFwdKinds];
extern const FwdInstance kFwdBf16D256M128N80[kNumFwdKinds];
extern const FwdInstance kFwdFp16D64M128N128[kNumFwdKinds];
extern const FwdInstance kFwdFp16D64M192N128[kNumFwdKinds];
extern const FwdInstance kFwdFp16D96M128N128[kNumFwdKinds];
extern const FwdInstance kFwdFp16D96M192N96[kNumFwdKinds];
extern const FwdInstance kFwdFp16D128M128N128[kNumFwdKinds];
extern const FwdInstance kFwdFp16D128M192N64[kNumFwdKinds];
extern const FwdInstance kFwdFp16D128M192N80[kNumFwdKinds];
extern const FwdInstance kFwdFp16D192E128M128N128[kNumFwdKinds];
extern const FwdInstance kFwdFp16D192E128M192N80[kNumFwdKinds];
extern const FwdInstance kFwdFp16D256M128N80[kNumFwdKinds];

}  // namespace magi
