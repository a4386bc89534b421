// The two matrix products of a step, as a consumer warpgroup issues them.
#pragma once
#include "../device/wgmma.h"
#include "rows.cuh"

namespace magi {

// S = Q K^T.
template <class Traits>
MAGI_DEVICE void issue_scores(const FwdRows<Traits>& me, float (&s)[Traits::kBlockN / 2],
                              int q_slot, int k_slot) {
  using Product = Wgmma<Traits::kBlockN, typename Traits::Element>;
  constexpr int kPanelSteps = Traits::kPanelSteps;
  const uint64_t q = smem_descriptor<Traits::kPanelCols>(smem_addr(me.smem.q[q_slot][me.consumer]));
  const uint64_t k = smem_descriptor<Traits::kPanelCols>(smem_addr(me.smem.k[k_slot]));
#pragma unroll
  for (int i = 0; i < Traits::kHeadDim / 16; ++i) {
    const int in_panel = i % kPanelSteps * 32, panel = i / kPanelSteps;
    Product::template ss<0, 0>(s, descriptor_plus(q, in_panel + panel * Traits::kQPanelBytes),
                               descriptor_plus(k, in_panel + panel * Traits::kKVPanelBytes),
                               i != 0);
  }
}
// O += P V, or O = P V.
template <class Traits>
MAGI_DEVICE void issue_output(const FwdRows<Traits>& me, float (&o)[Traits::kValueDim / 2],
                              const uint32_t (&probs)[Traits::kBlockN / 4], int v_slot,
                              int accumulate) {
  using Product = Wgmma<Traits::kValueDim, typename Traits::Element>;
  const uint64_t v =
      smem_descriptor<Traits::kPanelCols>(smem_addr(me.smem.v[v_slot]), Traits::kKVPanelBytes);
#pragma unroll
  for (int i = 0; i < Traits::kBlockN / 16; ++i)
    Product::template rs<1>(o, probs + 4 * i, descriptor_plus(v, i * 32 * Traits::kPanelCols),
                            i == 0 ? accumulate : 1);
}

}  // namespace magi
