// The consumer warpgroups for small heads: the steps of consume.cuh, two at a time, and the scores
// of the step ahead are multiplied while those of this step become gradients.
//
// At head_dim 64 the products of a step take half as long as at 128, and what a step waits for
// counts twice. So the warpgroups meet once for two steps: dS of both lies in shared memory then,
// and each warpgroup makes the whole dQ of one of them (m64n64 products instead of m64n32). K is an
// operand in registers, because shared memory is what limits the rest. A warpgroup works in this
// order, so that the tensor cores have something to do during all arithmetic:
//   dV(n), and meanwhile dS(n) to shared memory
//   S(n+1), dK(n), dP(n+1), and after the second step of a pair dQ
//   P(n+1) during what is left of these
// A step's data from the loader is waited for and read a step ahead, during P: a wait behind the
// warpgroup's own products drains their queue, which cost 4 to 10 % of the speed.
// A pair that lacks its second step has one without visible cells (load.cuh), whose dQ is dropped.
//
// The meeting is a barrier for every second pair (ds_full, 8 warps). Who passes it for one pair
// knows that both have read the dS of the pair before, since each has waited for its dQ.
#pragma once
#include "dq.cuh"
#include "scores.cuh"

namespace magi {

// Registers that a consumer warpgroup keeps through all steps.
template <bool kSoftcap>
struct BwdPairRegs {
  float dk[32], dv[32];
  float s[32];  // S, then P (softcap: what turns dP into dS), of the step ahead
  float dp[32];
  float dq[32];
  uint32_t k[16];       // this warpgroup's keys, operand A
  uint32_t weights[4];  // operand A of the stats: equal rows, of which three columns are not zero
  int partial;          // of the step ahead, see BwdStepMeta; of lane 0, see load_by_lane0
  float shift[kSoftcap ? 16 : 1];  // of the step ahead
  uint32_t p[kSoftcap ? 16 : 1];   // P of the step ahead
};

// A[64, 64] of a 128-byte-swizzled K-major tile as operand registers, four for every k16.
MAGI_DEVICE void load_operand(uint32_t (&a)[16], uint32_t tile, int warp, int lane) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    uint32_t part[4];
    ptx::ldmatrix_x4(part, tile + ptx::swizzle_offset(16 * warp + lane % 16, 2 * k + lane / 16));
#pragma unroll
    for (int i = 0; i < 4; ++i) a[4 * k + i] = part[i];
  }
}

template <class Traits>
struct BwdPairs : BwdConsumer<Traits> {
  using T = Traits;
  using Element = typename T::Element;
  using Wgmma = ptx::Wgmma<64, Element>;
  using BwdConsumer<T>::args, BwdConsumer<T>::wg, BwdConsumer<T>::smem, BwdConsumer<T>::bar,
      BwdConsumer<T>::arrive, BwdConsumer<T>::stats, BwdConsumer<T>::stat_tile,
      BwdConsumer<T>::finish_dq, BwdConsumer<T>::meta;
  using Regs = BwdPairRegs<T::kSoftcap>;
  static_assert(T::kHeadDim == 64 && T::kDqCols == 64, "registers suffice for small heads only");

  int num_steps;  // of whole pairs

  MAGI_DEVICE uint32_t query_tile(int offset, int n) const {
    return smem + offset + n % T::kStages * T::kQueryBytes;
  }
  // The loader fills a tile and its stats. Behind the last step there is nothing to wait for, and
  // what is made of old numbers is not used.
  MAGI_DEVICE void wait_for_tile(int first_bar, int n) const {
    if (n < num_steps) wait_for(bar(first_bar + 8 * (n % T::kStages)), n / T::kStages & 1);
  }
  MAGI_DEVICE bool has_arrived(int first_bar, int n) const {
    return ptx::mbar_test_wait(bar(first_bar + 8 * (n % T::kStages)), n / T::kStages & 1);
  }
  MAGI_DEVICE void load_partial(int n, Regs& r) const {
    if (ptx::thread_again() % 32 == 0)
      r.partial = ptx::load_shared_volatile(meta(n) + offsetof(BwdStepMeta, partial));
  }
  MAGI_DEVICE void start_with_stats(float (&acc)[32], int kind, int n, const Regs& r) const {
    Wgmma::template rs_first<0>(acc, r.weights, stats(kind, n));
  }

  MAGI_DEVICE void scores(int n, Regs& r) const {
    const uint64_t q = ptx::smem_descriptor(query_tile(T::kOffQ, n));
    if constexpr (T::kSoftcap) load_shifts(r.shift, stat_tile(0, n));
    ptx::wgmma_fence();
    if constexpr (T::kSoftcap)
      Wgmma::template rs_first<0>(r.s, r.k, q);
    else
      start_with_stats(r.s, 0, n, r);
#pragma unroll
    for (int k = T::kSoftcap ? 1 : 0; k < 4; ++k)
      Wgmma::template rs<0>(r.s, r.k + 4 * k, ptx::descriptor_plus(q, k * 32), 1);
    ptx::wgmma_commit();
  }
  MAGI_DEVICE void probability_gradients(int n, Regs& r) const {
    const uint64_t v = ptx::smem_descriptor(smem + T::kOffV + wg * 8192);
    const uint64_t dout = ptx::smem_descriptor(query_tile(T::kOffDo, n));
    ptx::wgmma_fence();
    start_with_stats(r.dp, 1, n, r);
#pragma unroll
    for (int k = 0; k < 4; ++k)
      Wgmma::template ss<0, 0>(r.dp, ptx::descriptor_plus(v, k * 32),
                               ptx::descriptor_plus(dout, k * 32), 1);
    ptx::wgmma_commit();
  }

  MAGI_DEVICE void probabilities(int n, Regs& r) const {
    if constexpr (T::kSoftcap) {
      capped_probabilities<Element>(args, r.shift, r.s, r.p);
    } else {
#pragma unroll
      for (int i = 0; i < 32; ++i) r.s[i] = ptx::exp2_approx(r.s[i] * args.scale_log2);
    }
    if (from_lane0(r.partial) >> wg & 1) {
      const int d_hi = from_lane0(load_by_lane0(meta(n) + offsetof(BwdStepMeta, d_hi)).x);
      const uint32_t visible = visible_cells(from_lane0(load_by_lane0(meta(n))), d_hi, wg);
      mask_scores(r.s, visible);
      if constexpr (T::kSoftcap) mask_packed(r.p, visible);
    }
  }

  MAGI_DEVICE void store_dq(int pair, const Regs& r) const {
    wait_for(bar(T::kBarDqEmpty + 8 * wg), (pair & 1) ^ 1);
    stage_dq<T>(r.dq, smem + T::kOffDq + wg * T::kDqBytes, ptx::thread_again() % 128 / 32,
                ptx::thread_again() % 32, dq_scale<T>(args));
  }

  // Begins with P(n) and dP(n) in registers, ends with P(n + 1) and dP(n + 1).
  template <bool kSecond>
  MAGI_DEVICE void step(int n, Regs& r) const {
    const int stage = n % T::kStages, pair = n / 2;
    uint32_t p[16], ds[16];
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if constexpr (T::kSoftcap)
        p[i] = r.p[i];
      else
        p[i] = ptx::pack2<Element>(r.s[2 * i], r.s[2 * i + 1]);
    ptx::wgmma_fence();
    gemm_over_queries<T>(r.dv, p, ptx::smem_descriptor(query_tile(T::kOffDo, n)));
    ptx::wgmma_commit();
    if (!kSecond && pair > 0) store_dq(pair - 1, r);  // here, before dS needs registers
#pragma unroll
    for (int i = 0; i < 16; ++i)
      ds[i] = ptx::pack2<Element>(r.s[2 * i] * r.dp[2 * i], r.s[2 * i + 1] * r.dp[2 * i + 1]);
    store_ds_rows(ds, smem + T::kOffDs + n % T::kStages * T::kScoreBytes, 64 * wg);

    scores(n + 1, r);
    if (kSecond) {  // the fence waits for the stores of both steps, S(n + 1) runs meanwhile
      ptx::fence_async_shared();
      __syncwarp();
      arrive(T::kBarDsFull + 8 * (pair % 2));
      if (pair > 0) arrive(T::kBarDqFull + 8 * wg);
    }
    ptx::wgmma_fence();
    gemm_over_queries<T>(r.dk, ds, ptx::smem_descriptor(query_tile(T::kOffQ, n)));
    ptx::wgmma_commit();
    probability_gradients(n + 1, r);
    ptx::wgmma_wait<2>();  // dV(n), S(n + 1)
    arrive(T::kBarDoEmpty + 8 * stage);
    if (kSecond) gradient_of_queries(pair, r);
    const bool is_there = (has_arrived(T::kBarQFull, n + 2) & has_arrived(T::kBarDoFull, n + 2)) |
                          (n + 2 >= num_steps);
    probabilities(n + 1, r);
    if (!is_there) {
      wait_for_tile(T::kBarQFull, n + 2);
      wait_for_tile(T::kBarDoFull, n + 2);
    }
    load_partial(n + 2, r);
    ptx::wgmma_wait<0>();
    arrive(T::kBarQEmpty + 8 * stage);
  }

  // dQ of the pair's first step (warpgroup 0) or second step, over all 128 keys.
  MAGI_DEVICE void gradient_of_queries(int pair, Regs& r) const {
    wait_for(bar(T::kBarDsFull + 8 * (pair % 2)), pair / 2 & 1);
    const uint32_t ds_tile = smem + T::kOffDs + (2 * pair + wg) % T::kStages * T::kScoreBytes;
    ptx::wgmma_fence();
    gemm_over_keys<T>(r.dq, ptx::smem_descriptor(ds_tile), ptx::smem_descriptor(smem + T::kOffK));
    ptx::wgmma_commit();
  }
};

template <class Traits>
MAGI_DEVICE void bwd_consume_pairs(const BwdArgs& args, int num_steps, int wg, uint32_t smem) {
  using T = Traits;
  using Element = typename T::Element;
  const BwdPairs<T> pairs{{args, wg, smem}, num_steps};
  BwdPairRegs<T::kSoftcap> r;
  r.partial = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) r.dk[i] = r.dv[i] = 0.f;
  const int column = threadIdx.x % 4;
  r.weights[0] = column == 0   ? ptx::pack2<Element>(kStatHigh, kStatMiddle)
                 : column == 1 ? ptx::pack2<Element>(kStatLow, 0.f)
                               : 0;
  r.weights[1] = r.weights[0];
  r.weights[2] = r.weights[3] = 0;
  if (num_steps > 0) {
    wait_for(pairs.bar(T::kBarKv), 0);
    load_operand(r.k, smem + T::kOffK + wg * 8192, ptx::thread_again() % 128 / 32,
                 ptx::thread_again() % 32);
    for (int n = 0; n < 2; ++n) {
      pairs.wait_for_tile(T::kBarQFull, n);
      pairs.wait_for_tile(T::kBarDoFull, n);
    }
    pairs.load_partial(0, r);
    pairs.scores(0, r);
    pairs.probability_gradients(0, r);
    ptx::wgmma_wait<1>();
    pairs.probabilities(0, r);
    ptx::wgmma_wait<0>();
    pairs.load_partial(1, r);
  }
#pragma unroll 1
  for (int n = 0; n < num_steps; n += 2) {
    pairs.template step<false>(n, r);
    pairs.template step<true>(n + 1, r);
  }
  if (num_steps > 0) {
    pairs.store_dq(num_steps / 2 - 1, r);
    pairs.finish_dq();
  }
  store_gradients<T>(args, r.dk, r.dv, wg, smem);
}

}  // namespace magi
