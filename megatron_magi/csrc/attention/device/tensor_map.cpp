#include "tensor_map.h"

#include "driver.h"
#include "panels.h"

namespace magi {
namespace {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

CUtensorMapDataType data_type(MapElement element) {
  switch (element) {
    case MapElement::kBf16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case MapElement::kFp16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  }
}

CUtensorMapSwizzle swizzle_mode(MapSwizzle swizzle) {
  switch (swizzle) {
    case MapSwizzle::k128B:
      return CU_TENSOR_MAP_SWIZZLE_128B;
    case MapSwizzle::k64B:
      return CU_TENSOR_MAP_SWIZZLE_64B;
    default:
      return CU_TENSOR_MAP_SWIZZLE_NONE;
  }
}

MapSwizzle panel_swizzle(uint32_t cols) {
  return cols == 64 ? MapSwizzle::k128B : MapSwizzle::k64B;
}

constexpr uint64_t kHalfBytes = 2;  // the tiles of heads are 16-bit only

}  // namespace

Status encode_tensor_map(CUtensorMap* map, MapElement element, MapSwizzle swizzle, const void* base,
                         int rank, const uint64_t* dims, const uint64_t* strides_bytes,
                         const uint32_t* box) {
  static const EncodeTiled encode = driver_function<EncodeTiled>("cuTensorMapEncodeTiled");
  if (encode == nullptr)
    return {kCudaError,
            "the CUDA driver has no cuTensorMapEncodeTiled; a 12.0 or newer driver is "
            "required"};
  static_assert(sizeof(cuuint64_t) == sizeof(uint64_t), "strides are passed through unchanged");
  const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
  CUresult result = encode(map, data_type(element), rank, const_cast<void*>(base),
                           reinterpret_cast<const cuuint64_t*>(dims),
                           reinterpret_cast<const cuuint64_t*>(strides_bytes), box, element_strides,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_mode(swizzle),
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    return {kInvalidArgument, "cuTensorMapEncodeTiled refused a tensor (driver error " +
                                  std::to_string(static_cast<int>(result)) +
                                  "); base and strides must be multiples of 16 bytes"};
  return {};
}

Status encode_head_tile(CUtensorMap* map, MapElement element, const MagiTensor& tensor,
                        int num_tokens, int num_heads, int head_dim, int box_tokens) {
  const uint32_t cols = panel_cols(head_dim), panels = head_dim / cols;
  const uint64_t dims[4] = {cols, static_cast<uint64_t>(num_tokens), panels,
                            static_cast<uint64_t>(num_heads)};
  const uint64_t strides[3] = {tensor.stride_token * kHalfBytes, cols * kHalfBytes,
                               tensor.stride_head * kHalfBytes};
  const uint32_t box[4] = {cols, static_cast<uint32_t>(box_tokens), panels, 1};
  return encode_tensor_map(map, element, panel_swizzle(cols), tensor.data, 4, dims, strides, box);
}

Status encode_packed_tile(CUtensorMap* map, MapElement element, const MagiTensor& tensor,
                          int num_tokens, int num_heads, int head_dim, int group, int box_tokens) {
  const uint32_t cols = panel_cols(head_dim), panels = head_dim / cols;
  const uint64_t dims[5] = {cols, static_cast<uint64_t>(group), static_cast<uint64_t>(num_tokens),
                            panels, static_cast<uint64_t>(num_heads / group)};
  const uint64_t strides[4] = {tensor.stride_head * kHalfBytes, tensor.stride_token * kHalfBytes,
                               cols * kHalfBytes, tensor.stride_head * kHalfBytes * group};
  const uint32_t box[5] = {cols, static_cast<uint32_t>(group), static_cast<uint32_t>(box_tokens),
                           panels, 1};
  return encode_tensor_map(map, element, panel_swizzle(cols), tensor.data, 5, dims, strides, box);
}

Status encode_panel_tile(CUtensorMap* map, MapElement element, const MagiTensor& tensor,
                         int num_tokens, int num_heads, int head_dim, int cols, int box_tokens) {
  const uint32_t panels = head_dim / cols;
  const uint64_t dims[4] = {static_cast<uint64_t>(cols), static_cast<uint64_t>(num_tokens), panels,
                            static_cast<uint64_t>(num_heads)};
  const uint64_t strides[3] = {tensor.stride_token * kHalfBytes, cols * kHalfBytes,
                               tensor.stride_head * kHalfBytes};
  // The box is as wide as the swizzle; columns behind the panel's are filled with zeros.
  const uint32_t box[4] = {64, static_cast<uint32_t>(box_tokens), panels, 1};
  return encode_tensor_map(map, element, MapSwizzle::k128B, tensor.data, 4, dims, strides, box);
}

}  // namespace magi
