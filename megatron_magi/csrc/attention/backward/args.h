// Arguments of the backward kernels, as the host fills them in.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../device/cap_polynomial.h"
#include "../device/kernel_chain.h"
#include "../device/kernel_list.h"
#include "../work_lists.h"
#include "blocks.h"
#include "params.h"

namespace magi {

struct BwdMaps {
  // P: columns of a panel; of dO and V, E for D.
  CUtensorMap q, dout;  // {P, T, D/P, H}, box {P, 64, D/P, 1}, panel_cols
  CUtensorMap k, v;     // {P, S, D/P, G}, box {64, bwd_tile_k, D/P, 1}, bwd_key_panel_cols
  CUtensorMap dq;       // fp32 {P, T, D/P, H}, box {P, 64, bwd_dq_panels, 1}, bwd_dq_panel_cols
};

// Columns of a panel of K and V, in 128-byte rows. A warpgroup makes dQ from its half of K's
// columns, so that half must begin with a panel; 96 columns are two panels that do not fill rows.
constexpr int bwd_key_panel_cols(int width) {
  return width % 64 == 0 ? 64 : width / 2;
}

// Columns of a panel of dQ: 128 bytes of fp32, swizzled, or a warpgroup's half of 96 columns, not
// swizzled (see stage_dq).
constexpr int bwd_dq_panel_cols(int head_dim) {
  return head_dim % 64 == 0 ? 32 : head_dim / 2;
}

// Panels of dQ that are added at a time: half of the columns, but all of head_dim 64 and a quarter
// of 256.
constexpr int bwd_dq_panels(int head_dim) {
  return head_dim == 64 || head_dim == 256 ? 2 : head_dim / 64;
}

// dst[t, h, :] = sum over parts of src[part, t, h, :].
struct BwdConvertJob {
  MagiTensor src;  // fp32
  MagiTensor dst;  // dtype or fp32
  int64_t part_stride;
  int32_t num_parts;
  int32_t num_tokens, num_heads, width;
  int32_t dst_is_fp32;
  int32_t end_block;  // of the launch; filled in by add_bwd_convert
};

// Where dk and dv are written.
struct BwdKeyGradients {
  void* dk;
  void* dv;
  int64_t dk_stride_token, dk_stride_head;
  int64_t dv_stride_token, dv_stride_head;
  int64_t dk_split_stride, dv_split_stride;  // elements between the sums of two splits
  bool is_fp32;
};

// Kernel arguments that are not tensor maps.
struct BwdArgs {
  const uint4* stats;        // [2 kinds, H, stat_rows]: see bwd_stat_rows
  int64_t stat_kind_stride;  // H * stat_rows
  const BwdItem* items;
  const BwdEntry* entries;
  const BwdPlace* places;  // deterministic mode, like turns and segments below
  BwdBlocks blocks;
  int32_t* semaphores;  // [0] ticket; deterministic mode: then [2 halves][H][row groups]
  BwdKeyGradients grads;
  float4* sums;           // MagiBwdParams.partial, if parts take turns, or null
  int32_t* parts_stored;  // of each sum, how many turns it has seen
  int32_t num_heads_q;
  int32_t num_row_groups;
  int32_t stat_rows;
  int32_t heads_inner;  // walk order: all heads of a query tile, or all tiles of a head
  int32_t descending;   // query tiles from the last to the first
  float scale_log2;
  float softmax_scale;
  float cap_scale;  // softmax_scale / softcap, and softcap * log2(e), where there is one
  float cap_log2;
  CapPolynomial cap_polynomial;         // of tanh
  float least_moderate, most_moderate;  // lse * log2(e) of rows whose scores it may cap
  const BwdTurn* turns;
  const BwdSegment* segments;
};

// Stats of a row, two kinds: -lse / softmax_scale, which the scores are shifted by (with
// bwd_scales_p, lse - log(softmax_scale) for lse), and -delta, which dP is shifted by. The tensor
// cores add them to the products they belong to, so each comes as eight 16-bit values of which the
// first three, times these units, sum up to it with the precision of fp32; up to 2e9 in fp16, where
// the units are all that gives it range. Head-major: a step reads 64 rows of a head. Steps may
// begin at the last row, so there are 64 rows more than tokens. With softcap nothing can be added
// to scores that are not capped yet, and those of row r of the first kind are -lse * log2(e) of the
// rows r, r + 1, r + 8 and r + 9 as fp32, which are what a thread needs at a time (see
// load_shifts).
constexpr float kStatHigh = 32768.f, kStatMiddle = 16.f, kStatLow = 1.f / 128.f;
constexpr int bwd_stat_rows(int num_q) {
  return (num_q + 65) & ~1;
}

// Whether P comes multiplied by softmax_scale, which costs nothing, because the stats of lse say
// so. Then dS, dQ and dK need no factor of their own, and dV is divided by it when it leaves. Not
// in fp16, whose smallest probabilities would lose bits; not measured with softcap and wider heads.
constexpr bool bwd_scales_p(int head_dim, bool is_bf16, bool has_softcap) {
  return head_dim <= 128 && is_bf16 && !has_softcap;
}

constexpr float kLog2e = 1.4426950408889634f;

// Memory that a launch sets to zero; aligned to 16 bytes.
struct BwdCleared {
  uint32_t* words;
  int64_t count;  // 0: none
};

struct BwdPrepareArgs {
  MagiTensor out, dout;  // data null: delta is given
  const float* lse;
  const float* delta;
  uint4* stats;  // [2, H, bwd_stat_rows(T)]
  int64_t lse_stride_token, lse_stride_head;
  int64_t delta_stride_token, delta_stride_head;
  int32_t num_q, num_heads_q;
  int32_t stat_rows;
  float softmax_scale;
  float log_of_factor;    // that P comes with, see bwd_scales_p
  BwdCleared cleared[2];  // dq_acc and semaphores, unless the driver fills them
};

struct BwdConvertArgs {
  BwdConvertJob jobs[3];  // dq, dk, dv, as far as they are wanted
  int32_t num_jobs;
};

// Each adds its kernel to the chain, which reads the arguments when it is launched; defined in
// run.cuh, instantiated in ../instantiations/bwd_*.cu.
template <int kDtype, int kHeadDim, int kValueDim, bool kDeterministic, bool kSoftcap>
cudaError_t add_bwd_main(BwdMaps* maps, BwdArgs* args, int num_blocks, KernelChain* chain);
template <int kDtype, int kValueDim, bool kSoftcap>
void add_bwd_prepare(BwdPrepareArgs* args, KernelChain* chain);
template <int kDtype, int kHeadDim, int kValueDim>
void add_bwd_convert(BwdConvertArgs* args, KernelChain* chain);
// A launch of its own.
template <int kDtype, int kValueDim>
cudaError_t run_bwd_delta(const MagiDeltaParams& args, cudaStream_t stream);

// The kernels of the four: the main ones with or without softcap, and the others.
template <int kDtype, int kHeadDim, int kValueDim, bool kSoftcap>
void list_bwd_main(KernelList* kernels);
template <int kDtype, int kHeadDim, int kValueDim>
void list_bwd(KernelList* kernels);

}  // namespace magi
