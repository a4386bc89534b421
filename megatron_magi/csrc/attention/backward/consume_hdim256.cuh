// The consumer warpgroups for the widest heads (256): one has dV of the block's 64 keys, the other
// one dK, and P and dS are handed from one to the other.
//
// dK and dV of 128 keys would fill the register file, so a tile has 64 keys, and a gradient of them
// is 128 registers of a thread. Warpgroup 0 makes P and adds to dV, with P as the operand in
// registers; warpgroup 1 makes dS and adds to dK likewise. Each makes half of the columns of dQ:
//   warpgroup 0   S(n), P(n) to warpgroup 1; dV(n); its dQ(n - 1)
//   warpgroup 1   dP(n), with P(n) to dS(n), to both; dK(n); its dQ(n)
// Warpgroup 0 makes dQ a step later, so it waits for nothing that warpgroup 1 does in this step,
// may be ahead of it, and what one of them computes runs during the products of the other one. If
// each made half of S, of dP and of the columns of dV and dK, the products would read more: a step
// would take 4400 clocks of shared memory, and not 3700.
//
// In clocks of shared memory, a step: S and dP 1024, dV and dK 512, dQ 384, P 64 + 64, dS 64, stats
// 64, dQ staging 512 + 512, loads 528: 3728, where the tensor cores need 2624.
//
// Who may write what, without barriers of its own:
//   P(n)    Warpgroup 0 has waited for dS(n - 1), which came after P(n - 1) was read.
//   dS(n)   Two tiles. P(n) came after warpgroup 0 had made dQ(n - 2), and all of warpgroup 1 has
//           met at dS(n - 1), after its own.
// Barriers of 4 warps: p_full, warpgroup 0 to 1; ds_full, warpgroup 1 to both. dQ goes through a
// staging tile for half of its columns, twice: the second half during the scores of the next step.
//
// Shared memory: K 32, V 32, Q 2 x 32, dO 32, dS 2 x 8, P 8, dQ 32, stats 10, rest 1 = 227 KiB.
// Registers of a consumer: dV or dK 128, then S or dP 32 with half of dQ 32, or dQ 64, of 240; with
// softcap, lse 16 and P 16 in addition to S.
//
// With softcap, warpgroup 0 hands over P (1 - tanh^2), what turns dP into dS, in place of P.
#pragma once
#include "dq.cuh"
#include "scores.cuh"

namespace magi {

template <class Traits>
struct BwdRelay : BwdConsumer<Traits> {
  using T = Traits;
  using Element = typename T::Element;
  using typename BwdConsumer<T>::Probs;
  using BwdConsumer<T>::args, BwdConsumer<T>::wg, BwdConsumer<T>::smem, BwdConsumer<T>::bar,
      BwdConsumer<T>::arrive, BwdConsumer<T>::q_tile, BwdConsumer<T>::stats,
      BwdConsumer<T>::weights, BwdConsumer<T>::wait_for_q, BwdConsumer<T>::finish_dq;
  static_assert(T::kHeadDim == T::kValueDim && T::kDqCols == 128 && T::kDqParts == 2);
  static_assert(T::kDoStages == 1 && T::kDsStages == 2 && T::kMetaSlots == 8);

  MAGI_DEVICE void release_q(int n) const { arrive(T::kBarQEmpty + 8 * (n % T::kStages)); }
  MAGI_DEVICE uint32_t ds_tile(int n) const {
    return smem + T::kOffDs + n % T::kDsStages * T::kScoreBytes;
  }

  MAGI_DEVICE void start_scores(int n, float (&s)[32]) const {
    ptx::wgmma_fence();
    this->multiply_scores(n, smem + T::kOffK, s);
    ptx::wgmma_commit();
  }
  // dP = V dO^T, less delta.
  MAGI_DEVICE void start_dp(int n, float (&dp)[32]) const {
    ptx::wgmma_fence();
    gemm_over_columns<T, T::kHeadDim>(dp, ptx::smem_descriptor(smem + T::kOffV),
                                      ptx::smem_descriptor(smem + T::kOffDo), weights(),
                                      stats(1, n));
    ptx::wgmma_commit();
  }
  // dV += P^T dO or dK += dS^T Q.
  MAGI_DEVICE void start_gradient(const uint32_t (&a)[16], uint32_t tile, float (&sum)[128]) const {
    ptx::wgmma_fence();
    gemm_over_queries<T>(sum, a, ptx::smem_descriptor(tile, T::kQueryPanelBytes));
    ptx::wgmma_commit();
  }
  // dQ of this warpgroup's 128 columns, two panels of K.
  MAGI_DEVICE void start_dq(int n, float (&dq)[64]) const {
    const uint32_t keys = smem + T::kOffK + wg * 2 * T::kKeyPanelBytes;
    ptx::wgmma_fence();
    gemm_over_keys<T>(dq, ptx::smem_descriptor(ds_tile(n)),
                      ptx::smem_descriptor(keys, T::kKeyPanelBytes));
    ptx::wgmma_commit();
  }

  // The staging tile has gone when this half of dQ comes to it.
  MAGI_DEVICE void store_half(const float (&half)[32], int which) const {
    wait_for(bar(T::kBarDqEmpty + 8 * wg), which ^ 1);
    stage_dq<T>(half, smem + T::kOffDq + wg * T::kDqBytes, ptx::thread_again() % 128 / 32,
                ptx::thread_again() % 32, 1.f);
  }
  // The first half leaves, the second half stays in registers: in others than those of the product,
  // or ptxas makes the next product wait.
  MAGI_DEVICE void store_first_half(const float (&dq)[64], float (&second)[32]) const {
    float first[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      first[i] = dq[i] * args.softmax_scale;
      second[i] = dq[32 + i] * args.softmax_scale;
    }
    store_half(first, 0);
    finish_dq();
  }

  // A thread of warpgroup 1 reads what the thread of the same number in warpgroup 0 has written.
  MAGI_DEVICE uint32_t own_p() const { return smem + T::kOffP + ptx::thread_again() % 128 * 16; }
  MAGI_DEVICE void give_p(const uint32_t (&p)[16]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      ptx::store_shared(own_p() + j * 2048,
                        make_uint4(p[4 * j], p[4 * j + 1], p[4 * j + 2], p[4 * j + 3]));
    __syncwarp();
    arrive(T::kBarPFull);
  }
  MAGI_DEVICE void take_p(int n, uint32_t (&p)[16]) const {
    wait_for(bar(T::kBarPFull), n & 1);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint4 x = ptx::load_shared_16(own_p() + j * 2048);
      p[4 * j] = x.x, p[4 * j + 1] = x.y, p[4 * j + 2] = x.z, p[4 * j + 3] = x.w;
    }
  }

  // Warpgroup 0. `second` is a half of dQ(n - 2), which leaves during the product.
  MAGI_DEVICE void make_p(int n, const float (&second)[32], Probs& probs) const {
    float s[32];
    [[maybe_unused]] float shift[16];  // with softcap
    wait_for_q(n);
    start_scores(n, s);
    if (n > 1) store_half(second, 1);
    if constexpr (T::kSoftcap) load_shifts(shift, this->stat_tile(0, n));
    ptx::wgmma_wait<0>();
    if (n > 1) finish_dq();
    this->to_probabilities(n, 0, shift, s, probs);
    release_q(n);
  }
  // Warpgroup 1; `second` is of dQ(n - 1).
  MAGI_DEVICE void make_ds(int n, const float (&second)[32], uint32_t (&ds)[16]) const {
    float dp[32];
    wait_for(bar(T::kBarDoFull), n & 1);
    start_dp(n, dp);
    if (n > 0) store_half(second, 1);
    ptx::wgmma_wait<0>();
    arrive(T::kBarDoEmpty);
    if (n > 0) finish_dq();
    take_p(n, ds);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 p = ptx::unpack2(ds[i], Element{});
      ds[i] = ptx::pack2<Element>(p.x * dp[2 * i], p.y * dp[2 * i + 1]);
    }
  }

  // Step n of warpgroup 0 without its dQ.
  MAGI_DEVICE void add_to_dv(int n, const float (&second)[32], float (&dv)[128]) const {
    Probs probs;
    make_p(n, second, probs);
    if (n > 0) wait_for(bar(T::kBarDsFull), (n - 1) & 1);
    give_p(probs.slopes());
    wait_for(bar(T::kBarDoFull), n & 1);
    start_gradient(probs.p, smem + T::kOffDo, dv);
    ptx::wgmma_wait<0>();
    arrive(T::kBarDoEmpty);
  }
  MAGI_DEVICE void run_dv(int num_steps, float (&dv)[128]) const {
    float second[32] = {};
#pragma unroll 1
    for (int n = 0; n <= num_steps; ++n) {
      if (n < num_steps) {
        add_to_dv(n, second, dv);
      } else if (n > 0) {
        if (n > 1) {
          store_half(second, 1);
          finish_dq();
        }
        wait_for(bar(T::kBarDsFull), (n - 1) & 1);
      }
      if (n > 0) {
        float dq[64];
        start_dq(n - 1, dq);
        ptx::wgmma_wait<0>();
        store_first_half(dq, second);
      } else if constexpr (T::kSoftcap) {
#pragma unroll
        for (int i = 0; i < 32; ++i) second[i] = 0.f;  // so the step above has its registers
      }
    }
    if (num_steps > 0) {
      store_half(second, 1);
      finish_dq();
    }
  }

  MAGI_DEVICE void run_dk(int num_steps, float (&dk)[128]) const {
    float second[32] = {};
#pragma unroll 1
    for (int n = 0; n < num_steps; ++n) {
      uint32_t ds[16];
      make_ds(n, second, ds);
      store_ds_rows(ds, ds_tile(n), 0);
      wait_for_q(n);
      start_gradient(ds, q_tile(n), dk);
      ptx::fence_async_shared();
      __syncwarp();
      arrive(T::kBarDsFull);
      wait_for(bar(T::kBarDsFull), n & 1);
      float dq[64];
      start_dq(n, dq);
      ptx::wgmma_wait<1>();  // dK
      release_q(n);
      ptx::wgmma_wait<0>();
      store_first_half(dq, second);
    }
    if (num_steps > 0) {
      store_half(second, 1);
      finish_dq();
    }
  }

  // dV or dK of the tile to global memory, as store_gradients does.
  MAGI_DEVICE void store_sum(float (&sum)[128]) const {
    // K and V are no longer read: their tiles stage the gradients.
    ptx::bar_sync(kBarEpilogue, 256);
    const bool is_dk = wg == 1;
    const BwdBlock<T> block(args, ptx::load_shared_volatile(smem + T::kOffBlock));
    if (!take_turn(args, block, sum)) return;
    const BwdKeyGradients& to = args.grads;
    const int64_t split_stride = is_dk ? to.dk_split_stride : to.dv_split_stride;
    const int64_t token_stride = is_dk ? to.dk_stride_token : to.dv_stride_token;
    const int64_t head_stride = is_dk ? to.dk_stride_head : to.dv_stride_head;
    const int64_t first = block.split * split_stride + block.item.k_start * token_stride +
                          block.kv_head * head_stride;
    char* base = static_cast<char*>(is_dk ? to.dk : to.dv) + first * (to.is_fp32 ? 4 : 2);
    store_gradient<T>(sum, smem + (is_dk ? T::kOffK : T::kOffV), base, token_stride, to.is_fp32, 0,
                      block.item.k_rows, is_dk ? args.softmax_scale : 1.f,
                      ptx::thread_again() % 128 / 32, ptx::thread_again() % 32);
  }
};

template <class Traits>
MAGI_DEVICE void bwd_consume_relay(const BwdArgs& args, int num_steps, int wg, uint32_t smem) {
  const BwdRelay<Traits> relay{{args, wg, smem}};
  float sum[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) sum[i] = 0.f;
  if (num_steps > 0) wait_for(relay.bar(Traits::kBarKv), 0);
  if (wg == 0)
    relay.run_dv(num_steps, sum);
  else
    relay.run_dk(num_steps, sum);
  relay.store_sum(sum);
}

}  // namespace magi
