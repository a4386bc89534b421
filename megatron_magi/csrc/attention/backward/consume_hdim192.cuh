// The consumer warpgroups for heads whose dK and dV leave few registers (query and key 192, value
// 128): the steps of consume.cuh with one operand in flight at a time.
//
// dK and dV take 160 registers of 240, and operands in flight must fit in the rest. So P is kept in
// 16 bits only, and dS is made of that; dS goes to shared memory only, and dK reads it there; and
// dQ is made in two products, of a panel of 64 columns and of half a panel. A warpgroup works in
// this order, and the other one fills the gaps of the tensor cores:
//   S(n), P(n)
//   dP(n), dV(n); dS(n) during dV; the warpgroups meet
//   dQ(n) of a panel, half of dK(n); dQ goes to its staging tile during dK
//   dQ(n) of half a panel, the other half of dK(n); likewise
// S(n + 1) issued behind the products of the last line was 3 % slower, in front of them 15 %.
//
// There is room for one dO and one dS. ds_empty says that both warpgroups have read the dS of the
// step before; it has mostly happened when they come to ask.
#pragma once
#include "dq.cuh"
#include "scores.cuh"

namespace magi {

template <class Traits>
struct BwdWide : BwdConsumer<Traits> {
  using T = Traits;
  using Element = typename T::Element;
  using typename BwdConsumer<T>::Probs;
  using BwdConsumer<T>::args, BwdConsumer<T>::wg, BwdConsumer<T>::smem, BwdConsumer<T>::bar,
      BwdConsumer<T>::arrive, BwdConsumer<T>::q_tile, BwdConsumer<T>::stats,
      BwdConsumer<T>::weights;
  static_assert(T::kDqCols == 96 && T::kDoStages == 1 && T::kDsStages == 1);

  MAGI_DEVICE void scores(int n, float (&s)[32]) const {
    ptx::wgmma_fence();
    this->multiply_scores(n, smem + T::kOffK + wg * 8192, s);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
  }

  MAGI_DEVICE void probabilities(int n, Probs& probs) const {
    float s[32];
    [[maybe_unused]] float shift[16];  // with softcap
    this->wait_for_q(n);
    if constexpr (T::kSoftcap) load_shifts(shift, this->stat_tile(0, n));
    scores(n, s);
    this->to_probabilities(n, wg, shift, s, probs);
  }

  // dP and dV are multiplied; dP becomes dS, in shared memory.
  MAGI_DEVICE void score_gradients(int n, Probs& probs, float (&dv)[64]) const {
    const uint32_t do_tile = smem + T::kOffDo;
    float dp[32];
    wait_for(bar(T::kBarDoFull), n & 1);
    ptx::wgmma_fence();
    gemm_over_columns<T, T::kValueDim>(dp, ptx::smem_descriptor(smem + T::kOffV + wg * 8192),
                                       ptx::smem_descriptor(do_tile), weights(), stats(1, n));
    ptx::wgmma_commit();
    gemm_over_queries<T>(dv, probs.p, ptx::smem_descriptor(do_tile, T::kQueryPanelBytes));
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    const int thread = ptx::thread_again();
    const uint32_t row = smem + T::kOffDs + (64 * wg + thread % 128 / 32 * 16 + thread % 16) * 128;
    const uint32_t swizzle = ((thread % 32 / 16) ^ (thread % 8)) << 4;
    wait_for(bar(T::kBarDsEmpty), (n & 1) ^ 1);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t ds[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = ptx::unpack2(probs.slopes()[4 * j + i], Element{});
        ds[i] = ptx::pack2<Element>(pair.x * dp[8 * j + 2 * i], pair.y * dp[8 * j + 2 * i + 1]);
      }
      ptx::stmatrix_x4(row + (swizzle ^ (j * 32)), ds[0], ds[1], ds[2], ds[3]);
    }
    ptx::fence_async_shared();
  }

  // dK += dS^T Q over query rows [16 kBegin, 16 kEnd): as an operand in registers dS would cost 16.
  template <int kBegin, int kEnd>
  MAGI_DEVICE void key_gradients(int n, float (&dk)[96]) const {
    const uint64_t ds = ptx::smem_descriptor(smem + T::kOffDs + wg * 8192);
    const uint64_t queries = ptx::smem_descriptor(q_tile(n), T::kQueryPanelBytes);
#pragma unroll
    for (int k = kBegin; k < kEnd; ++k)
      ptx::Wgmma<T::kHeadDim, Element>::template ss<0, 1>(
          dk, ptx::descriptor_plus(ds, k * 32), ptx::descriptor_plus(queries, k * 2048), 1);
  }

  // dQ of this warpgroup's 96 columns: a panel of 64, and its half of the middle panel.
  MAGI_DEVICE void query_gradients(float (&dq)[32]) const {
    gemm_over_keys<T>(dq, ptx::smem_descriptor(smem + T::kOffDs),
                      ptx::smem_descriptor(smem + T::kOffK + wg * 2 * T::kKeyPanelBytes));
  }
  MAGI_DEVICE void query_gradients_of_middle(float (&dq)[16]) const {
    gemm_over_keys<T>(dq, ptx::smem_descriptor(smem + T::kOffDs),
                      ptx::smem_descriptor(smem + T::kOffK + T::kKeyPanelBytes + wg * 64));
  }
  // The staging tile has three panels of 32 columns, in the order of the columns.
  MAGI_DEVICE uint32_t dq_tile(int panel) const {
    return smem + T::kOffDq + wg * T::kDqBytes + panel * T::kDqPanelBytes;
  }
  template <int kCount>
  MAGI_DEVICE void store_dq(const float (&dq)[kCount], int panel) const {
    stage_dq<T>(dq, dq_tile(panel), ptx::thread_again() % 128 / 32, ptx::thread_again() % 32,
                args.softmax_scale);
  }

  MAGI_DEVICE void step(int n, float (&dk)[96], float (&dv)[64]) const {
    {
      Probs probs;
      probabilities(n, probs);
      score_gradients(n, probs, dv);
      ptx::bar_sync(kBarScores, 256);
      ptx::wgmma_wait<0>();  // dV
      arrive(T::kBarDoEmpty);
    }
    {
      float dq[32];
      ptx::wgmma_fence();
      query_gradients(dq);
      ptx::wgmma_commit();
      key_gradients<0, 2>(n, dk);
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      wait_for(bar(T::kBarDqEmpty + 8 * wg), (n & 1) ^ 1);
      store_dq(dq, wg);
    }
    float dq[16];
    ptx::wgmma_fence();
    query_gradients_of_middle(dq);
    ptx::wgmma_commit();
    key_gradients<2, 4>(n, dk);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    store_dq(dq, 2 - 2 * wg);
    this->finish_dq();
    ptx::wgmma_wait<0>();  // dK
    arrive(T::kBarDsEmpty);
    arrive(T::kBarQEmpty + 8 * (n % T::kStages));
  }
};

template <class Traits>
MAGI_DEVICE void bwd_consume_wide(const BwdArgs& args, int num_steps, int wg, uint32_t smem) {
  using T = Traits;
  const BwdWide<T> wide{{args, wg, smem}};
  float dk[96], dv[64];
#pragma unroll
  for (int i = 0; i < 96; ++i) dk[i] = 0.f;
#pragma unroll
  for (int i = 0; i < 64; ++i) dv[i] = 0.f;
  if (num_steps > 0) wait_for(wide.bar(T::kBarKv), 0);
#pragma unroll 1
  for (int n = 0; n < num_steps; ++n) wide.step(n, dk, dv);
  store_gradients<T>(args, dk, dv, wg, smem);
}

}  // namespace magi
