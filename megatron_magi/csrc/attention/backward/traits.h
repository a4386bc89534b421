// Tile sizes, shared-memory plan and barriers of the backward main kernel.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../device/watchdog.h"
#include "args.h"

namespace magi {

// What a step is, in tile coordinates: key row r of the tile and query row c are visible to each
// other iff c < c_end, r_lo <= r < r_hi, b_lo <= r - c <= b_hi.
struct alignas(16) BwdStepMeta {
  int32_t c_end, r_lo, r_hi, b_lo;
  int32_t b_hi;
  int32_t partial;       // bit w: keys [64 w, 64 w + 64) of the tile have masked cells
  int32_t q_tile, head;  // where dQ goes
  BwdVisit visit;        // deterministic mode
};

// Named barriers (0 is __syncthreads).
enum BwdNamedBarrier : int { kBarScores = 1, kBarEpilogue = 2 };

template <class Element_, int kHeadDim_, bool kDeterministic_>
struct BwdTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kDeterministic = kDeterministic_;
  static constexpr int kTileK = 128;  // keys: 64 per consumer warpgroup
  static constexpr int kTileQ = 64;
  // Small heads leave room to work on two steps at a time (pairs.cuh).
  static constexpr bool kInPairs = kHeadDim == 64;
  static constexpr int kStages = kInPairs ? 4 : 2;  // of Q, dO, the stats and dS
  static constexpr int kMetaSlots = 2 * kStages;
  static constexpr int kThreads = 384;
  static constexpr int kProducerRegs = kInPairs ? 24 : 40;
  static constexpr int kConsumerRegs = kInPairs ? 240 : 232;

  static constexpr int kPanels = kHeadDim / 64;  // panels of 64 16-bit columns = 128 bytes
  static constexpr int kKeyPanelBytes = kTileK * 128;
  static constexpr int kQueryPanelBytes = kTileQ * 128;
  static constexpr int kKeyBytes = kPanels * kKeyPanelBytes;
  static constexpr int kQueryBytes = kPanels * kQueryPanelBytes;
  static constexpr int kScoreBytes = kTileK * kTileQ * 2;
  // Of dQ, a consumer warpgroup makes half of the columns, or one step's rows of a pair.
  static constexpr int kDqCols = kInPairs ? kHeadDim : kHeadDim / 2;
  static constexpr int kDqPanels = kDqCols / 32;  // panels of 32 fp32 columns = 128 bytes
  static constexpr int kDqPanelBytes = kTileQ * 128;
  static constexpr int kDqBytes = kDqPanels * kDqPanelBytes;
  static constexpr int kStatHalf = kTileQ * 16;     // of one kind: 8 columns, what is loaded
  static constexpr int kStatBytes = 2 * kStatHalf;  // with 8 columns of zeros
  static constexpr int kMetaBytes = static_cast<int>(sizeof(BwdStepMeta));

  static constexpr int kOffK = 0;
  static constexpr int kOffV = kOffK + kKeyBytes;
  static constexpr int kOffQ = kOffV + kKeyBytes;
  static constexpr int kOffDo = kOffQ + kStages * kQueryBytes;
  static constexpr int kOffDs = kOffDo + kStages * kQueryBytes;
  static constexpr int kOffDq = kOffDs + kStages * kScoreBytes;
  static constexpr int kOffStats = kOffDq + 2 * kDqBytes;  // [stage][lse, delta]
  static constexpr int kOffWeights = kOffStats + kStages * 2 * kStatBytes;
  static constexpr int kOffMeta = kOffWeights + kStatBytes;
  static constexpr int kOffBars = kOffMeta + kMetaSlots * kMetaBytes;
  static constexpr int kNumBars = 4 * kStages + 1 + 4 + (kInPairs ? 2 : 0);
  static constexpr int kOffBlock = kOffBars + 8 * kNumBars;
  static constexpr int kSmemBytes = kOffBlock + 8;

  // Barriers, as offsets from kOffBars; see the table in kernel.cuh.
  static constexpr int kBarQFull = 0;
  static constexpr int kBarQEmpty = kBarQFull + 8 * kStages;
  static constexpr int kBarDoFull = kBarQEmpty + 8 * kStages;
  static constexpr int kBarDoEmpty = kBarDoFull + 8 * kStages;
  static constexpr int kBarKv = kBarDoEmpty + 8 * kStages;
  static constexpr int kBarDqFull = kBarKv + 8;
  static constexpr int kBarDqEmpty = kBarDqFull + 16;
  static constexpr int kBarDsFull = kBarDqEmpty + 16;  // kInPairs only

  static_assert(kHeadDim == 64 || kHeadDim == 128, "layouts were verified for these head sizes");
  static_assert(kOffQ % 1024 == 0 && kOffDo % 1024 == 0 && kOffDs % 1024 == 0 && kOffDq % 1024 == 0,
                "128-byte swizzled tiles must start at multiples of 1024 bytes");
  static_assert(128 * kProducerRegs + 256 * kConsumerRegs <= 168 * kThreads,
                "setmaxnreg shares out the registers of the launch, 168 per thread");
  static_assert(kSmemBytes <= 227 * 1024, "a block has 227 KiB of shared memory");
};

}  // namespace magi
