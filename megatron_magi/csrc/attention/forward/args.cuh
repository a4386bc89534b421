// Arguments of the forward kernel, and state that its producer and consumers share.
#pragma once
#include "../device/cap_polynomial.h"
#include "../device/watchdog.h"
#include "../params.h"
#include "traits.h"

namespace magi {

using namespace ptx;

enum StepFlags : int {
  kStepMasked = 1,
  kStepFirst = 2,
  kStepLast = 4,
  kStepEnd = 8,
  kStepBySums = 16,  // no mask, and not the item's first without one (where Traits::kBySums)
};

struct FwdKernelParams {
  CUtensorMap map_q, map_k, map_v, map_out;
  MagiFwdParams args;
  // A unit is what one block computes of a tile: a head, or `pack` heads of one kv head.
  int32_t num_items;  // tiles x units
  int32_t num_units;
  int32_t section_units;  // units of one section
  int32_t units_per_kv;
  int32_t pack_shift;  // log2(pack)
  float scale_log2;    // log2(e) times softmax_scale, or times softcap
  float inverse_scale_log2;
  float cap_scale;    // softmax_scale / softcap, where there is one
  int32_t unshifted;  // with softcap, 1: the softmax has no shift, see capped.cuh
  CapPolynomial cap_polynomial;
  SmallCapPolynomial small_cap;
};

// A position in a ring of kSlots slots and the parity of its current pass.
template <int kSlots>
struct RingPosition {
  int slot = 0;
  uint32_t phase = 0;
  MAGI_DEVICE void advance() {
    if (++slot == kSlots) {
      slot = 0;
      phase ^= 1;
    }
  }
};

}  // namespace magi
