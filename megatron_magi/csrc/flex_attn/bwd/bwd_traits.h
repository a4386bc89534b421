// Tile sizes, shared-memory plan and barriers of the backward main kernel.
#pragma once
#include <cstdint>
#include <type_traits>

#include "../common/ptx.h"
#include "bwd_args.h"

namespace magi {

// What a step is, in tile coordinates: key row r of the tile and query row c are visible to each
// other iff c < c_end, r_lo <= r < r_hi, b_lo <= r - c <= b_hi.
struct alignas(16) BwdStepMeta {
  int32_t c_end, r_lo, r_hi, b_lo;
  int32_t b_hi;
  int32_t q_tile, head;  // where dQ goes
  int32_t reserved;
  int4 visit;  // deterministic mode: struct BwdVisit
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
  static constexpr int kStages = 2;
  static constexpr int kThreads = 384;
  static constexpr int kProducerRegs = 40;
  static constexpr int kConsumerRegs = 232;
  // bf16 folds softmax_scale into dS, which costs nothing. fp16 would lose small dS to its
  // exponent range, so there the scale is applied to dQ and dK in fp32.
  static constexpr bool kScaleInScores = std::is_same_v<Element, ptx::bf16>;

  static constexpr int kPanels = kHeadDim / 64;  // panels of 64 16-bit columns = 128 bytes
  static constexpr int kKeyPanelBytes = kTileK * 128;
  static constexpr int kQueryPanelBytes = kTileQ * 128;
  static constexpr int kKeyBytes = kPanels * kKeyPanelBytes;
  static constexpr int kQueryBytes = kPanels * kQueryPanelBytes;
  static constexpr int kScoreBytes = kTileK * kTileQ * 2;
  static constexpr int kDqCols = kHeadDim / 2;    // columns of dQ per consumer warpgroup
  static constexpr int kDqPanels = kDqCols / 32;  // panels of 32 fp32 columns = 128 bytes
  static constexpr int kDqPanelBytes = kTileQ * 128;
  static constexpr int kDqBytes = kDqPanels * kDqPanelBytes;
  // Stats of a step, permuted so that a thread reads its 16 values of each kind with 16-byte
  // loads: query 8 j + 2 c + e lies at float c * 20 + 2 j + e (20: four threads, four banks).
  static constexpr int kStatFloats = 80;  // of one kind
  static constexpr int kStatBytes = 2 * kStatFloats * 4;
  static constexpr int kMetaBytes = static_cast<int>(sizeof(BwdStepMeta));

  static constexpr int kOffK = 0;
  static constexpr int kOffV = kOffK + kKeyBytes;
  static constexpr int kOffQ = kOffV + kKeyBytes;
  static constexpr int kOffDo = kOffQ + kStages * kQueryBytes;
  static constexpr int kOffDs = kOffDo + kStages * kQueryBytes;
  static constexpr int kOffDq = kOffDs + 2 * kScoreBytes;
  static constexpr int kOffStats = kOffDq + 2 * kDqBytes;
  static constexpr int kOffMeta = kOffStats + kStages * kStatBytes;
  static constexpr int kOffDqMeta = kOffMeta + kStages * kMetaBytes;
  static constexpr int kOffBars = kOffDqMeta + 2 * 32;
  static constexpr int kNumBars = 4 * kStages + 1 + 4;
  static constexpr int kSmemBytes = kOffBars + 8 * kNumBars + 8;

  // Barriers, as offsets from kOffBars; see the table in bwd_kernel.cuh.
  static constexpr int kBarQFull = 0;
  static constexpr int kBarQEmpty = kBarQFull + 8 * kStages;
  static constexpr int kBarDoFull = kBarQEmpty + 8 * kStages;
  static constexpr int kBarDoEmpty = kBarDoFull + 8 * kStages;
  static constexpr int kBarKv = kBarDoEmpty + 8 * kStages;
  static constexpr int kBarDqFull = kBarKv + 8;
  static constexpr int kBarDqEmpty = kBarDqFull + 16;

  static_assert(kHeadDim == 64 || kHeadDim == 128, "layouts were verified for these head sizes");
  static_assert(kOffQ % 1024 == 0 && kOffDo % 1024 == 0 && kOffDs % 1024 == 0 && kOffDq % 1024 == 0,
                "128-byte swizzled tiles must start at multiples of 1024 bytes");
  static_assert(128 * kProducerRegs + 256 * kConsumerRegs <= 168 * kThreads,
                "setmaxnreg shares out the registers of the launch, 168 per thread");
  static_assert(kSmemBytes <= 227 * 1024, "a block has 227 KiB of shared memory");
};

}  // namespace magi
