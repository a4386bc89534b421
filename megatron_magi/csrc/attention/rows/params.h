// Rows between ranks, as they cross the C ABI; mirrored by ctypes in core/cuda/abi.py.
// Conventions are those of ../params.h, but strides are between rows.
#pragma once
#include "../params.h"

constexpr int kMagiMaxRowParts = 2;  // keys and values

struct MagiRows {
  void* data;      // 16-byte aligned
  int64_t stride;  // bytes, multiple of 16
};

// dst[part][i] = src[part][index[i]].
struct MagiGatherParams {
  MagiRows src[kMagiMaxRowParts];
  MagiRows dst[kMagiMaxRowParts];
  const int32_t* index;  // [num_rows]; null: row i
  void* stream;          // host: cudaStream_t
  int64_t num_rows;
  int32_t row_bytes;  // of every part, multiple of 16
  int32_t num_parts;
};

// dst[part][i] = own[part][i] + sum of received[part][sources[j]], j from begin[i] to begin[i + 1],
// added in fp32 in this order. dst may be own: then rows without sources are left alone.
struct MagiAddParams {
  MagiRows own[kMagiMaxRowParts];       // fp32
  MagiRows received[kMagiMaxRowParts];  // received_dtype
  MagiRows dst[kMagiMaxRowParts];       // dst_dtype
  const int32_t* begin;                 // [num_rows + 1]
  const int32_t* sources;               // [begin[num_rows]]
  void* stream;                         // host: cudaStream_t
  int64_t num_rows;
  int32_t width;  // elements of every part's row, multiple of 8
  int32_t num_parts;
  int32_t received_dtype, dst_dtype;  // MagiDtype
};
