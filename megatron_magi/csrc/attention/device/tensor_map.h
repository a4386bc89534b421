// Host side of TMA: tensor maps over [T, H, D] tensors.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "../params.h"
#include "status.h"

namespace magi {

enum class MapElement { kBf16, kFp16, kFp32 };
// That of 16-bit inputs.
inline MapElement map_element(int32_t dtype) {
  return dtype == kMagiBf16 ? MapElement::kBf16 : MapElement::kFp16;
}
enum class MapSwizzle { kNone, k64B, k128B };

// Encodes `rank` dimensions, innermost first; `strides_bytes` are those of dimensions 1.. .
// Out-of-range elements load as zero and are not stored.
Status encode_tensor_map(CUtensorMap* map, MapElement element, MapSwizzle swizzle, const void* base,
                         int rank, const uint64_t* dims, const uint64_t* strides_bytes,
                         const uint32_t* box);

// 16-bit tile [panels of P = panel_cols(D) columns][box_tokens][2 P bytes], one instruction.
// Map {P, T, D/P, H}, coordinates {0, token, 0, head}.
Status encode_head_tile(CUtensorMap* map, MapElement element, const MagiTensor& tensor,
                        int num_tokens, int num_heads, int head_dim, int box_tokens);

// The same with `group` heads of one kv head packed into the rows: row = token * group + head.
// Map {P, group, T, D/P, H/group}, coordinates {0, 0, token, 0, kv head}.
Status encode_packed_tile(CUtensorMap* map, MapElement element, const MagiTensor& tensor,
                          int num_tokens, int num_heads, int head_dim, int group, int box_tokens);

// 16-bit tile [panels of `cols` columns][box_tokens][128 bytes], of which a row's columns may be
// fewer than fill it. Map {cols, T, D/cols, H}, coordinates {0, token, 0, head}.
Status encode_panel_tile(CUtensorMap* map, MapElement element, const MagiTensor& tensor,
                         int num_tokens, int num_heads, int head_dim, int cols, int box_tokens);

}  // namespace magi
