// Types of the C ABI: plain structs, mirrored by ctypes in core/cuda/abi.py.
// Every pointer is a device pointer unless it says host. Strides are in elements; the last
// dimension is contiguous. Shape letters: T query tokens, S key tokens, H query heads, G kv heads,
// D head_dim of queries and keys, E value_dim: of values and outputs. Changing a struct means
// raising kAbiVersion.
#pragma once
#include <cstdint>

enum MagiDtype : int32_t { kMagiBf16 = 0, kMagiFp16 = 1, kMagiFp32 = 2 };

struct MagiTensor {
  void* data;            // 16-byte aligned
  int64_t stride_token;  // multiple of 16 bytes
  int64_t stride_head;   // multiple of 16 bytes
};

struct MagiFwdParams {
  MagiTensor q;               // [T, H, D] dtype
  MagiTensor k;               // [S, G, D] dtype
  MagiTensor v;               // [S, G, E] dtype
  MagiTensor out;             // [T, H, E] out_dtype
  float* lse;                 // [T, H] natural log, -inf for rows that see nothing
  int64_t lse_stride_token;   // elements
  int64_t lse_stride_head;    // elements
  const float* sink_lse;      // [T, H]: a logit without a value row, which joins rows below num_q
                              // (rows above are later parts of their keys); null: there is none
  int64_t sink_stride_token;  // elements; 0: the same for all tokens
  const int32_t* tiles;       // [num_tiles, 8]: struct FwdTile of work_lists.h, largest first
  const int32_t* entries;     // [entries of all tiles, 12]: struct FwdEntry of work_lists.h
  const int32_t* empty_rows;  // [num_empty_ranges, 2]: rows that no slice covers
  float* max_logits;          // [H], raised to the largest visible logits; null: not asked
  int32_t* counter;           // [2], zero before the first launch; the kernel leaves it zero
  void* stream;               // host: cudaStream_t
  int32_t num_q, num_k;       // T, S
  int32_t num_heads_q, num_heads_kv;
  int32_t head_dim, value_dim;
  int32_t dtype;      // MagiDtype of q, k, v
  int32_t out_dtype;  // dtype or kMagiFp32
  int32_t merge;      // 1: out (fp32) and lse hold an earlier result to continue from
  int32_t num_tiles;
  float softcap;  // logit = softcap * tanh(softmax_scale * score / softcap); 0: off
  int32_t num_empty_ranges;
  // kv heads that are worked on together: as many as fit in L2, or more if these are too few items.
  int32_t heads_per_section;
  int32_t pack;     // query heads packed into one tile's rows: power of two, divides H / G
  int32_t block_m;  // query rows per tile: 128 or 192
  int32_t block_n;  // keys per tile: 64, 80, 96 or 128
  int32_t num_sms;
  float softmax_scale;
};
