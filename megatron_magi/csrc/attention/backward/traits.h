// Tile sizes, shared-memory plan and barriers of the backward main kernel.
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "../device/panels.h"
#include "../device/watchdog.h"
#include "args.h"
#include "visit.h"

namespace magi {

// One step. The first five numbers are the band of its slice in coordinates of its tiles,
// where the query rows begin at 0.
struct alignas(16) BwdStepMeta {
  int32_t q_end, k_start, k_end, d_lo;
  int32_t d_hi;
  int32_t partial;       // bit w: keys [64 w, 64 w + 64) have masked cells or are not in the tile
  int32_t q_tile, head;  // where dQ goes
  int32_t unused[4];
};

// Named barriers (0 is __syncthreads).
enum BwdNamedBarrier : int { kBarScores = 1, kBarEpilogue = 2 };

template <class Element_, int kHeadDim_, bool kDeterministic_, int kValueDim_, bool kSoftcap_>
struct BwdTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;    // of queries and keys
  static constexpr int kValueDim = kValueDim_;  // of values and outputs
  static constexpr bool kDeterministic = kDeterministic_;
  static constexpr bool kSoftcap = kSoftcap_;
  static constexpr int kTileK = bwd_tile_k(kHeadDim);  // 64 per consumer warpgroup, or for both
  static constexpr int kTileQ = kBwdTileQ;
  // Small heads leave room to work on two steps at a time (consume_hdim64.cuh).
  static constexpr bool kInPairs = kHeadDim == 64;
  // The widest heads: one consumer warpgroup has dV of the tile, the other one dK
  // (consume_hdim256.cuh).
  static constexpr bool kRelay = kTileK == 64;
  // Wide heads leave room for one dO, one dS, and packed probabilities only.
  static constexpr bool kWide = !kRelay && kHeadDim + kValueDim > 256;
  // Softcap: whether a polynomial caps the scores of moderate steps (see are_moderate). In pairs it
  // costs registers, and wider heads hide the instruction for tanh.
  static constexpr bool kCapsByPolynomial = kSoftcap && !kInPairs && kHeadDim <= 128;
  static constexpr bool kScalesP =
      bwd_scales_p(kHeadDim, std::is_same_v<Element, ptx::bf16>, kSoftcap);
  // The loop has a step for each stage, whose addresses are constants then: 7 % fewer instructions
  // at head_dim 128 and up to 5 % more speed, 3 % at 96. Deterministic at 128 it would spill
  // registers and lose 4 %.
  static constexpr bool kStepForEachStage =
      kScalesP && !kInPairs && !(kHeadDim == 128 && kDeterministic);
  static constexpr int kStages = kInPairs ? 4 : 2;  // of Q and the stats
  static constexpr int kDoStages = kWide || kRelay ? 1 : kStages;
  static constexpr int kDsStages = kWide ? 1 : kStages;
  static constexpr int kMetaSlots = (kRelay ? 4 : 2) * kStages;
  static constexpr int kVisitsAtOnce = kRelay ? 8 : 32;  // as many as there is room for
  // Deterministic mode: warp 1 signals what warps 2 and 3 have added (dq_in_order.cuh). In pairs
  // and at the widest heads these signal themselves (dq_order_inline.cuh).
  static constexpr bool kHandsOver = kDeterministic && !kInPairs && !kRelay;
  static constexpr int kVisitSlots = kDeterministic ? 2 * kVisitsAtOnce : 1;
  static constexpr int kThreads = 384;
  static constexpr int kProducerRegs = kInPairs || kWide || kRelay ? 24 : 40;
  static constexpr int kConsumerRegs = kInPairs || kWide || kRelay ? 240 : 232;

  // Of 16-bit columns; a panel of K or V has rows of 128 bytes, which 48 columns do not fill.
  static constexpr int kKeyPanelCols = bwd_key_panel_cols(kHeadDim);
  static constexpr int kKeyPanelBytes = kTileK * 128;
  static constexpr int kQueryPanelCols = panel_cols(kHeadDim);
  static constexpr int kQueryPanelBytes = kTileQ * kQueryPanelCols * 2;
  static constexpr int kKeyBytes = kHeadDim / kKeyPanelCols * kKeyPanelBytes;
  static constexpr int kValueBytes = kValueDim / kKeyPanelCols * kKeyPanelBytes;
  static constexpr int kQueryBytes = kHeadDim / kQueryPanelCols * kQueryPanelBytes;
  static constexpr int kDoBytes = kValueDim / kQueryPanelCols * kQueryPanelBytes;
  static constexpr int kScoreBytes = kTileK * kTileQ * 2;
  // Of dQ, a consumer warpgroup makes half of the columns, or one step's rows of a pair.
  static constexpr int kDqCols = kInPairs ? kHeadDim : kHeadDim / 2;
  static constexpr int kDqParts = kRelay ? 2 : 1;  // that go through the staging tile one by one
  static constexpr int kDqPanelCols = bwd_dq_panel_cols(kHeadDim);
  static constexpr int kDqPanels = kDqCols / kDqParts / kDqPanelCols;
  static constexpr int kDqPanelBytes = kTileQ * kDqPanelCols * 4;
  static constexpr int kDqBytes = kDqPanels * kDqPanelBytes;
  static constexpr int kStatHalf = kTileQ * 16;     // of one kind: 8 columns, what is loaded
  static constexpr int kStatBytes = 2 * kStatHalf;  // with 8 columns of zeros
  static constexpr int kMetaBytes = static_cast<int>(sizeof(BwdStepMeta));

  // Tiles of 128-byte swizzle must start at multiples of 1024 bytes.
  struct SharedStorage {
    alignas(1024) uint8_t k[kKeyBytes];
    alignas(1024) uint8_t v[kValueBytes];
    alignas(1024) uint8_t q[kStages][kQueryBytes];
    alignas(1024) uint8_t dout[kDoStages][kDoBytes];
    alignas(1024) uint8_t ds[kDsStages + kRelay][kScoreBytes];  // the last of kRelay is P
    alignas(1024) uint8_t dq[2][kDqBytes];
    uint8_t stats[kStages][2][kStatBytes];  // of lse and of delta
    uint8_t weights[kStatBytes];
    BwdStepMeta meta[kMetaSlots];
    // Barriers; see the table in kernel.cuh.
    uint64_t q_full[kStages], q_empty[kStages];
    uint64_t do_full[kStages], do_empty[kStages];
    uint64_t kv;
    uint64_t dq_full[2], dq_empty[2];
    uint64_t ds_bars[kInPairs || kRelay ? 2 : 1];
    int32_t block;
    // Deterministic mode, see dq_order.cuh, dq_in_order.cuh and dq_order_inline.cuh.
    BwdVisit visits[kVisitSlots];
    uint64_t visits_full[2], visits_empty[2];
    int32_t added[2];
  };
  static constexpr int kSmemBytes = sizeof(SharedStorage);

  // Where its parts begin: the kernel computes with 32-bit addresses, because pointers cost
  // registers.
#define MAGI_OFFSET(member) static_cast<int>(offsetof(SharedStorage, member))
  static constexpr int kOffK = MAGI_OFFSET(k), kOffV = MAGI_OFFSET(v);
  static constexpr int kOffQ = MAGI_OFFSET(q), kOffDo = MAGI_OFFSET(dout);
  static constexpr int kOffDs = MAGI_OFFSET(ds), kOffDq = MAGI_OFFSET(dq);
  static constexpr int kOffP = kOffDs + kDsStages * kScoreBytes;  // kRelay only
  static constexpr int kOffStats = MAGI_OFFSET(stats), kOffWeights = MAGI_OFFSET(weights);
  static constexpr int kOffMeta = MAGI_OFFSET(meta), kOffBlock = MAGI_OFFSET(block);
  static constexpr int kOffVisits = MAGI_OFFSET(visits), kOffAdded = MAGI_OFFSET(added);
  static constexpr int kOffBars = MAGI_OFFSET(q_full);
  // Barriers, from the first one.
  static constexpr int kBarQFull = 0, kBarQEmpty = MAGI_OFFSET(q_empty) - kOffBars;
  static constexpr int kBarDoFull = MAGI_OFFSET(do_full) - kOffBars;
  static constexpr int kBarDoEmpty = MAGI_OFFSET(do_empty) - kOffBars;
  static constexpr int kBarKv = MAGI_OFFSET(kv) - kOffBars;
  static constexpr int kBarDqFull = MAGI_OFFSET(dq_full) - kOffBars;
  static constexpr int kBarDqEmpty = MAGI_OFFSET(dq_empty) - kOffBars;
  static constexpr int kBarDsFull = MAGI_OFFSET(ds_bars) - kOffBars;  // kInPairs and kRelay
  static constexpr int kBarVisitsFull = MAGI_OFFSET(visits_full) - kOffBars;
  static constexpr int kBarVisitsEmpty = MAGI_OFFSET(visits_empty) - kOffBars;
  static constexpr int kBarDsEmpty = kBarDsFull;    // kWide only
  static constexpr int kBarPFull = kBarDsFull + 8;  // kRelay only
#undef MAGI_OFFSET

  static_assert((kHeadDim == kValueDim &&
                 (kHeadDim == 64 || kHeadDim == 96 || kHeadDim == 128 || kHeadDim == 256)) ||
                    (kHeadDim == 192 && kValueDim == 128),
                "layouts were verified for these head sizes");
  static_assert(kDqPanels == bwd_dq_panels(kHeadDim), "the host encodes this box");
  static_assert(128 * kProducerRegs + 256 * kConsumerRegs <= 168 * kThreads,
                "setmaxnreg shares out the registers of the launch, 168 per thread");
  static_assert(kSmemBytes <= 227 * 1024, "a block has 227 KiB of shared memory");
};

}  // namespace magi
