// Arguments of the backward through the C ABI; mirrored by ctypes in core/cuda/abi.py.
// Conventions and letters are those of ../params.h.
#pragma once
#include "../params.h"

// One backward pass. Everything is enqueued on `stream`; nothing synchronises.
//   1. prepare: stats from lse and delta, or from lse and out; dq_acc is cleared if asked for (by a
//      fill before it if that is faster), and so are semaphores
//   2. main:    dk, dv, and dq added to dq_acc
//   3. convert: dq_acc to dq, and the partial sums of split groups to dk and dv
struct MagiBwdParams {
  MagiTensor q;        // [T, H, D] dtype
  MagiTensor k;        // [S, G, D] dtype
  MagiTensor v;        // [S, G, E] dtype
  MagiTensor dout;     // [T, H, E] dtype
  MagiTensor out;      // [T, H, E] dtype: delta is made from it; data null: delta is given
  MagiTensor dq_acc;   // [T, H, D] fp32; gradients are added to it
  MagiTensor dq;       // [T, H, D] dtype: dq_acc converted; data null: not wanted
  MagiTensor dk;       // [S, G, D] grad_dtype
  MagiTensor dv;       // [S, G, E] grad_dtype
  const float* lse;    // [T, H] natural log, -inf for rows that see nothing
  const float* delta;  // [T, H] rowsum(out * dout); null: out is given
  int64_t lse_stride_token, lse_stride_head;      // elements
  int64_t delta_stride_token, delta_stride_head;  // elements
  void* stats;  // workspace [2, H, round_up(T + 64, 2)] of 16 bytes, aligned to that
  // Workspace of a launch that works on tiles in parts. Of splits at once, each has its own sums,
  // [num_splits, S, G, D + E] fp32; unused if num_splits is 1. Parts in turns have one for a tile
  // and each kv head of a section, [num_tiles, heads, keys of a tile, D + E] fp32.
  float* partial;
  const int32_t* items;     // [num_items, 8]: struct BwdItem of work_lists.h
  const int32_t* entries;   // [num_entries, 8]: struct BwdEntry
  const int32_t* places;    // [num_entries, 4], deterministic mode only: struct BwdPlace
  const int32_t* turns;     // [num_turns, 2], likewise: struct BwdTurn
  const int32_t* segments;  // [num_segments, 2], likewise: struct BwdSegment
  int32_t* semaphores;      // of any content: in deterministic mode 1 + 2 * H * num_row_groups; if
                            // parts take turns 1 + num_tiles * kv heads of a section
  void* stream;             // host: cudaStream_t
  int32_t num_q, num_k;     // T, S
  int32_t num_heads_q, num_heads_kv;
  int32_t head_dim, value_dim;
  int32_t dtype;       // MagiDtype of q, k, v, dout, dq
  int32_t grad_dtype;  // of dk and dv: dtype or kMagiFp32
  int32_t num_items;
  int32_t num_tiles;   // of keys; fewer than items if these are bands of query rows
  int32_t num_splits;  // blocks that share the query heads of one kv head; divides H / G
  // Lanes that are worked on together: kv heads, each with its splits, one after another, or some
  // splits of one; divides G * num_splits.
  int32_t lanes_per_section;
  // 1: parts of a tile, which are splits and bands of query rows, add to one sum in the order in
  // which their blocks start. Not in deterministic mode. 0: each split has a sum of its own, and
  // there are no bands.
  int32_t in_turns;
  // So many kv heads come first, one after another and not split; the others' lanes follow. Needs
  // parts in turns, and no bands.
  int32_t whole_heads;
  int32_t clear_dq;  // 1: dq_acc is set to zero first (it must be contiguous)
  int32_t deterministic;
  int32_t num_row_groups;  // deterministic mode only
  int32_t heads_inner;     // walk order, see BwdArgs
  int32_t descending;
  float softmax_scale;
  float softcap;  // as in the forward; 0: off
};

// delta = rowsum(out * dout), the term that every score gradient subtracts.
struct MagiDeltaParams {
  MagiTensor out;   // [T, H, E] dtype
  MagiTensor dout;  // [T, H, E] dtype
  float* delta;     // [T, H] contiguous
  void* stream;     // host: cudaStream_t
  int32_t num_tokens, num_heads;
  int32_t value_dim;
  int32_t dtype;  // kMagiBf16 or kMagiFp16
};
