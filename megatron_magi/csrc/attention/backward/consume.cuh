// The two consumer warpgroups: 64 keys each, dK and dV in registers.
#pragma once
#include "dq.cuh"
#include "scores.cuh"

namespace magi {

template <class Traits>
MAGI_DEVICE void bwd_consume(const BwdArgs& args, int num_steps, int wg, uint32_t smem) {
  using T = Traits;
  using Element = typename T::Element;
  const uint32_t bars = smem + T::kOffBars;
  const BwdConsumer<T> me{args, wg, smem};

  float dk[T::kHeadDim / 2], dv[T::kHeadDim / 2];
#pragma unroll
  for (int i = 0; i < T::kHeadDim / 2; ++i) dk[i] = dv[i] = 0.f;
  if (num_steps > 0) wait_for(bars + T::kBarKv, 0);
  const auto step = [&](int n, int stage) {
    const uint32_t parity = (n / T::kStages) & 1;
    const uint32_t q_tile = me.q_tile(stage);
    const uint32_t do_tile = smem + T::kOffDo + stage * T::kDoBytes;
    const uint32_t meta = me.meta(n);

    // 1. S^T and dP^T
    float s[32], dp[32];
    [[maybe_unused]] float shift[16];  // with softcap
    wait_for(bars + T::kBarQFull + 8 * stage, parity);
    const int4 by_lane0 = load_by_lane0(meta + offsetof(BwdStepMeta, d_hi));
    if constexpr (T::kSoftcap) load_shifts(shift, me.stat_tile(0, stage));
    ptx::wgmma_fence();
    if constexpr (T::kSoftcap)
      gemm_over_columns<T, T::kHeadDim>(s, ptx::smem_descriptor(smem + T::kOffK + wg * 8192),
                                        ptx::smem_descriptor<T::kQueryPanelCols>(q_tile));
    else
      gemm_over_columns<T, T::kHeadDim>(s, ptx::smem_descriptor(smem + T::kOffK + wg * 8192),
                                        ptx::smem_descriptor<T::kQueryPanelCols>(q_tile),
                                        me.weights(), me.stats(0, stage));
    ptx::wgmma_commit();
    // Here, where the load has come back, and the queue not yet full with products.
    const int d_hi = from_lane0(by_lane0.x), partial = from_lane0(by_lane0.y);
    [[maybe_unused]] const bool moderate = T::kCapsByPolynomial && are_moderate(args, shift);
    wait_for(bars + T::kBarDoFull + 8 * stage, parity);
    ptx::wgmma_fence();
    gemm_over_columns<T, T::kValueDim>(dp, ptx::smem_descriptor(smem + T::kOffV + wg * 8192),
                                       ptx::smem_descriptor<T::kQueryPanelCols>(do_tile),
                                       me.weights(), me.stats(1, stage));
    ptx::wgmma_commit();
    if (n > 0) me.finish_dq();

    // 2. P^T
    ptx::wgmma_wait<1>();
    uint32_t p[16];
    if constexpr (T::kSoftcap) {
      if (moderate)
        capped_probabilities<Element>(args, shift, s, p,
                                      [&](float score) { return args.cap_polynomial.of(score); });
      else
        capped_probabilities<Element>(args, shift, s, p);
      if (partial >> wg & 1) {
        const uint32_t visible = visible_cells(from_lane0(load_by_lane0(meta)), d_hi, wg);
        mask_scores(s, visible);
        mask_packed(p, visible);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 32; ++i) s[i] = ptx::exp2_approx(s[i] * args.scale_log2);
      if (partial >> wg & 1)
        mask_scores(s, visible_cells(from_lane0(load_by_lane0(meta)), d_hi, wg));
#pragma unroll
      for (int i = 0; i < 16; ++i) p[i] = ptx::pack2<Element>(s[2 * i], s[2 * i + 1]);
    }

    // 3. dV
    ptx::wgmma_fence();
    gemm_over_queries<T, 0, 2>(
        dv, p, ptx::smem_descriptor<T::kQueryPanelCols>(do_tile, T::kQueryPanelBytes));
    ptx::wgmma_commit();

    // 4. dS^T
    ptx::wgmma_wait<1>();
    uint32_t ds[16];
#pragma unroll
    for (int i = 0; i < 16; ++i)
      ds[i] = ptx::pack2<Element>(s[2 * i] * dp[2 * i], s[2 * i + 1] * dp[2 * i + 1]);
    store_ds_rows(ds, smem + T::kOffDs, 64 * wg, stage * T::kScoreBytes);
    ptx::wgmma_fence();
    gemm_over_queries<T, 2>(dv, p,
                            ptx::smem_descriptor<T::kQueryPanelCols>(do_tile, T::kQueryPanelBytes));
    ptx::wgmma_commit();
    ptx::fence_async_shared();
    ptx::bar_sync(kBarScores, 256);

    // 5. and 6. The stores of dQ wait in the queue behind dK.
    float dq[T::kDqCols / 2];
    ptx::wgmma_fence();
    gemm_over_keys<T>(dq, ptx::smem_descriptor(smem + T::kOffDs + stage * T::kScoreBytes),
                      ptx::smem_descriptor(smem + T::kOffK + wg * T::kKeyPanelBytes));
    ptx::wgmma_commit();
    gemm_over_queries<T>(dk, ds,
                         ptx::smem_descriptor<T::kQueryPanelCols>(q_tile, T::kQueryPanelBytes));
    ptx::wgmma_commit();
    ptx::wgmma_wait<2>();  // dV
    me.arrive(T::kBarDoEmpty + 8 * stage);
    ptx::wgmma_wait<1>();  // dQ
    wait_for(bars + T::kBarDqEmpty + 8 * wg, (n & 1) ^ 1);
    stage_dq<T>(dq, smem + T::kOffDq + wg * T::kDqBytes, ptx::thread_again() % 128 / 32,
                ptx::thread_again() % 32, dq_scale<T>(args));
    ptx::wgmma_wait<0>();  // dK
    me.arrive(T::kBarQEmpty + 8 * stage);
  };
#pragma unroll 1
  for (int n = 0; n < num_steps; ++n) {
    if constexpr (T::kStepForEachStage) {
      step(n, 0);
      if (++n == num_steps) break;
      step(n, 1);
    } else {
      step(n, n % T::kStages);
    }
  }
  if (num_steps > 0) me.finish_dq();
  store_gradients<T>(args, dk, dv, wg, smem);
}

}  // namespace magi
