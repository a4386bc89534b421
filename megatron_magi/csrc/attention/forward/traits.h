// Tile sizes and shared-memory plan of the forward.
#pragma once
#include <cstdint>
#include <type_traits>

#include "../device/panels.h"
#include "../device/ptx.h"
#include "../work_lists.h"

namespace magi {

// Message of the producer to the consumers of a step: StepFlags, and for a masked step the slice,
// relative to the tile's first token and the step's first key. Two words of 16 bytes, which stay
// apart: as one struct of numbers they cost the kernels registers, and packed rows 6 % of the
// speed.
struct FwdStep {
  int4 rows;  // flags, q_start, q_end, -
  int4 keys;  // k_start, k_end, d_lo, d_hi

  static MAGI_HOST_DEVICE int4 rows_of(int flags, const Band& band) {
    return make_int4(flags, band.q_start, band.q_end, 0);
  }
  static MAGI_HOST_DEVICE int4 keys_of(const Band& band) {
    return make_int4(band.k_start, band.k_end, band.d_lo, band.d_hi);
  }
  MAGI_HOST_DEVICE int flags() const { return rows.x; }
  static MAGI_HOST_DEVICE Band band(const int4& rows, const int4& keys) {
    return {rows.y, rows.z, keys.x, keys.y, keys.z, keys.w};
  }
};
// Message of the producer to the consumers of an item: the first row of its output, its tokens, its
// unit (a head, or `pack` heads of one kv head; see FwdKernelParams) and the number of its tile.
struct alignas(16) FwdItem {
  int32_t out_start, num_tokens, unit, tile;
};

template <class Element_, int kHeadDim_, int kBlockM_, int kBlockN_, int kValueDim_,
          bool kMaxLogits_, bool kSoftcap_>
struct FwdTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;    // of queries and keys
  static constexpr int kValueDim = kValueDim_;  // of values and outputs
  static constexpr bool kMaxLogits = kMaxLogits_;
  static constexpr bool kSoftcap = kSoftcap_;
  // True if the softmax of a moderate softcap needs no shift, see capped.cuh.
  static constexpr bool kMayBeUnshifted = kSoftcap && std::is_same_v<Element, ptx::bf16>;
  static constexpr bool kUnshifted = false;  // true in Unshifted
  // True if it then caps small scores by polynomials. The products of wider heads take so long that
  // the unit for tanh suffices.
  static constexpr bool kCapsByPolynomial = kMayBeUnshifted && kHeadDim <= 128;
  static constexpr int kBlockM = kBlockM_;  // rows of a tile: 64 of each consumer warpgroup
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kConsumers = kBlockM / 64;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kProducerRegs = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegs = kConsumers == 2 ? 232 : 160;
  // True if steps look for a new maximum only where the sums of their exponentials ask for it
  // (softmax.cuh). Wider heads gain nothing by it, and three consumers of 192 spill.
  static constexpr bool kBySums =
      !kSoftcap && (kHeadDim <= 128 || (kHeadDim == 192 && kConsumers == 2));
  // True if largest logits are stored in the steps that find them, and not at the end of an item.
  static constexpr bool kTellsLargest = kBySums && kMaxLogits;
  static constexpr int kStages = kBySums && kHeadDim == 64 ? 3 : 2;  // of K and of V
  static constexpr int kQBytes = 64 * kHeadDim * 2;                  // one consumer's rows
  static constexpr int kOutBytes = 64 * kValueDim * 2;               // likewise
  static constexpr int kKBytes = kBlockN * kHeadDim * 2;
  static constexpr int kVBytes = kBlockN * kValueDim * 2;
  // Room for Q tiles and for a buffer of the output; without the buffer the
  // output leaves straight from registers.
  static constexpr int kRoom = 226 * 1024 - kStages * (kKBytes + kVBytes);
  static constexpr bool kStageOut = kRoom >= kConsumers * (kQBytes + kOutBytes);
  static constexpr bool kFitsTwoQ = kRoom >= kConsumers * (2 * kQBytes + kOutBytes);
  // True if an item ends before the next one begins (by_item.cuh): with one Q tile, and where that
  // is faster.
  static constexpr bool kByItem = !kFitsTwoQ || kHeadDim == 128 || kCapsByPolynomial;
  static constexpr int kQStages = kByItem ? 1 : 2;
  // True if the consumers issue their products in turn (rows.cuh).
  static constexpr bool kTurns =
      kByItem ? (kConsumers == 2 ? kHeadDim > 128 : kCapsByPolynomial&& kHeadDim == 64)
              : (kBySums && kConsumers == 3);
  // So many of a thread's exponentials are made during the product in flight; the others follow it
  // and are packed as they come. By item, that has been measured with 192 columns only.
  static constexpr int kEarlyScores = kByItem || kSoftcap ? kBlockN / 2 : kBySums ? 8 : 0;
  static constexpr int kStepSlots = 2 * kStages;   // see kernel.cuh
  static constexpr int kItemSlots = kQStages + 2;  // see kernel.cuh

  static constexpr int kPanelCols = panel_cols(kHeadDim);
  static constexpr int kPanelSteps = kPanelCols / 16;  // of a product over its columns
  static constexpr int kQPanelBytes = 64 * kPanelCols * 2;
  static constexpr int kKVPanelBytes = kBlockN * kPanelCols * 2;

  struct SharedStorage {
    alignas(1024) uint8_t q[kQStages][kConsumers][kQBytes];
    alignas(1024) uint8_t k[kStages][kKBytes];
    alignas(1024) uint8_t v[kStages][kVBytes];
    alignas(1024) uint8_t out[kStageOut ? kConsumers * kOutBytes : 16];
    FwdStep steps[kStepSlots];
    FwdItem items[kItemSlots];
    uint64_t empty_q[kQStages];
    uint64_t full_k[kStages], empty_k[kStages];
    uint64_t full_v[kStages], empty_v[kStages];
  };
  static constexpr int kSharedBytes = sizeof(SharedStorage);

  static_assert(kHeadDim % 32 == 0 && kPanelCols == panel_cols(kValueDim),
                "heads are cut into panels of one width");
  static_assert(kKVPanelBytes % 1024 == 0, "panels start on a swizzle atom");
  static_assert(kBlockN % 16 == 0, "P V steps take 16 keys");
  static_assert(128 * kProducerRegs + 128 * kConsumers * kConsumerRegs <=
                    65536 / kThreads / 8 * 8 * kThreads,
                "setmaxnreg may only hand out the registers the launch took");
  static_assert(kMaxLogits || !kSoftcap, "softcap without max logits is not compiled");
  static_assert(kConsumers == 2 || kConsumers == 3, "register budgets are set for these");
  static_assert(kSharedBytes <= 227 * 1024, "a Hopper block has 227 KB of shared memory");
};

// Traits of launches whose softmax has no shift.
template <class Traits>
struct Unshifted : Traits {
  static constexpr bool kUnshifted = true;
};

}  // namespace magi
