// Waiting at an mbarrier, or for a count in global memory. A library that is built with
// -DMAGI_DEBUG_WATCHDOG stops with an error instead of hanging; both directions wait here and
// nowhere else.
#pragma once
#ifdef MAGI_DEBUG_WATCHDOG
#include <cstdio>
#endif

#include "ptx.h"

namespace magi {

MAGI_DEVICE void wait_for(uint32_t bar, uint32_t parity) {
#ifdef MAGI_DEBUG_WATCHDOG
  for (int tries = 0; !ptx::mbar_try_wait(bar, parity); ++tries)
    if (tries > 1000000) {
      printf("block %d thread %d waits at barrier %u, parity %u\n", blockIdx.x, threadIdx.x,
             bar % 256, parity);
      __trap();
    }
#else
  ptx::mbar_wait(bar, parity);
#endif
}

// Until other blocks have brought the count at `word` to this one. Their earlier writes are visible
// then.
MAGI_DEVICE void wait_for_count(const int32_t* word, int count) {
  for (int tries = 0; ptx::load_acquire_gpu(word) < count; ++tries) {
    __nanosleep(100);
#ifdef MAGI_DEBUG_WATCHDOG
    if (tries > 10000000) {
      printf("block %d waits for count %d, which is at %d\n", blockIdx.x, count,
             ptx::load_acquire_gpu(word));
      __trap();
    }
#endif
  }
}

}  // namespace magi
