// Host entries of the backward: check the parameters, encode the tensor maps, pick the variant.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>

#include "../device/export.h"
#include "../device/tensor_map.h"
#include "../widths.h"
#include "args.h"

namespace magi {
namespace {

// Expects kv heads that divide the query heads.
Status check_schedule(const MagiBwdParams& p) {
  if (p.num_splits < 1 || p.num_heads_q / p.num_heads_kv % p.num_splits != 0)
    return {kInvalidArgument, "num_splits must divide the query heads per kv head, got " +
                                  std::to_string(p.num_splits) + "; use 1"};
  if (p.whole_heads < 0 || p.whole_heads >= p.num_heads_kv || (p.whole_heads > 0 && !p.in_turns))
    return {kInvalidArgument, "whole_heads must be below the kv heads and needs in_turns, got " +
                                  std::to_string(p.whole_heads) + "; use 0"};
  const int lanes = p.lanes_per_section,
            most_lanes = (p.num_heads_kv - p.whole_heads) * p.num_splits;
  if (lanes < 1 || most_lanes % lanes != 0 ||
      (lanes % p.num_splits != 0 && p.num_splits % lanes != 0))
    return {kInvalidArgument,
            "lanes_per_section must be whole kv heads or some splits of one, and "
            "divide them all, got " +
                std::to_string(lanes) + "; use 1"};
  if ((p.num_splits > 1 || p.in_turns) && p.partial == nullptr)
    return {kInvalidArgument, "parts of tiles need the workspace `partial`; pass it"};
  if (p.in_turns && p.deterministic)
    return {kInvalidArgument, "parts in turns have no deterministic mode; pass in_turns 0"};
  const bool in_bands = p.num_tiles != p.num_items;
  if (p.num_tiles > p.num_items || (in_bands && (!p.in_turns || p.whole_heads > 0)))
    return {kInvalidArgument,
            "num_tiles must be that of items, or below it with in_turns and without whole_heads, "
            "got " +
                std::to_string(p.num_tiles) + " and " + std::to_string(p.num_items) +
                " items; pass their number"};
  if ((p.in_turns || p.deterministic) && p.semaphores == nullptr)
    return {kInvalidArgument, "blocks that wait need the workspace `semaphores`; pass it"};
  return {};
}

Status check(const MagiBwdParams& p) {
  if (p.num_heads_kv <= 0 || p.num_heads_q % p.num_heads_kv != 0)
    return {kInvalidArgument, "query heads must be a multiple of kv heads, got " +
                                  std::to_string(p.num_heads_q) + " and " +
                                  std::to_string(p.num_heads_kv) + "; repeat the kv heads"};
  MAGI_RETURN_IF_ERROR(check_schedule(p));
  if (p.lse == nullptr || (p.delta == nullptr) == (p.out.data == nullptr))
    return {kInvalidArgument,
            "lse and either delta or out are required, got none or both; pass lse and one of them"};
  if (!(p.softcap >= 0.f))
    return {kInvalidArgument,
            "softcap must be 0 (off) or above, got " + std::to_string(p.softcap) + "; pass 0"};
  if (p.num_q == 0 && p.num_items > 0)
    return {kInvalidArgument, "items need queries, got " + std::to_string(p.num_items) +
                                  " items and none; pass no items"};
  const int64_t blocks = int64_t{p.num_items} * p.num_heads_kv * p.num_splits;
  if (blocks > INT32_MAX)
    return {kUnsupported, "a launch has at most 2^31 - 1 blocks, got " + std::to_string(blocks) +
                              "; use fewer splits or rows"};
  if (p.grad_dtype != p.dtype && p.grad_dtype != kMagiFp32)
    return {kUnsupported, "grad_dtype must be fp32 or that of q, got code " +
                              std::to_string(p.grad_dtype) + "; cast the result"};
  return {};
}

// A map has at least one row; no block reads through those that are left out.
Status encode_keys(const MagiBwdParams& p, BwdMaps* maps) {
  if (p.num_k == 0) return {};
  const auto element = map_element(p.dtype);
  const int tile_k = bwd_tile_k(p.head_dim);
  MAGI_RETURN_IF_ERROR(encode_panel_tile(&maps->k, element, p.k, p.num_k, p.num_heads_kv,
                                         p.head_dim, bwd_key_panel_cols(p.head_dim), tile_k));
  return encode_panel_tile(&maps->v, element, p.v, p.num_k, p.num_heads_kv, p.value_dim,
                           bwd_key_panel_cols(p.value_dim), tile_k);
}

Status encode_maps(const MagiBwdParams& p, BwdMaps* maps) {
  const auto element = map_element(p.dtype);
  MAGI_RETURN_IF_ERROR(
      encode_head_tile(&maps->q, element, p.q, p.num_q, p.num_heads_q, p.head_dim, kBwdTileQ));
  MAGI_RETURN_IF_ERROR(encode_head_tile(&maps->dout, element, p.dout, p.num_q, p.num_heads_q,
                                        p.value_dim, kBwdTileQ));
  MAGI_RETURN_IF_ERROR(encode_keys(p, maps));
  const uint32_t cols = bwd_dq_panel_cols(p.head_dim), panels = bwd_dq_panels(p.head_dim);
  const uint64_t dq_dims[4] = {cols, static_cast<uint64_t>(p.num_q), p.head_dim / cols,
                               static_cast<uint64_t>(p.num_heads_q)};
  const uint64_t dq_strides[3] = {static_cast<uint64_t>(p.dq_acc.stride_token) * 4,
                                  uint64_t{4} * cols,
                                  static_cast<uint64_t>(p.dq_acc.stride_head) * 4};
  const uint32_t dq_box[4] = {cols, kBwdTileQ, panels, 1};
  const MapSwizzle swizzle = cols == 32 ? MapSwizzle::k128B : MapSwizzle::kNone;
  return encode_tensor_map(&maps->dq, MapElement::kFp32, swizzle, p.dq_acc.data, 4, dq_dims,
                           dq_strides, dq_box);
}

BwdKeyGradients final_grads(const MagiBwdParams& p) {
  return {p.dk.data,
          p.dv.data,
          p.dk.stride_token,
          p.dk.stride_head,
          p.dv.stride_token,
          p.dv.stride_head,
          0,
          0,
          p.grad_dtype == kMagiFp32};
}

// Partial sums: dk [num_splits, S, G, D] and dv [num_splits, S, G, E] in fp32.
BwdKeyGradients partial_grads(const MagiBwdParams& p) {
  BwdKeyGradients to{};
  to.dk_stride_token = int64_t{p.num_heads_kv} * p.head_dim;
  to.dv_stride_token = int64_t{p.num_heads_kv} * p.value_dim;
  to.dk_stride_head = p.head_dim;
  to.dv_stride_head = p.value_dim;
  to.dk_split_stride = p.num_k * to.dk_stride_token;
  to.dv_split_stride = p.num_k * to.dv_stride_token;
  to.dk = p.partial;
  to.dv = p.partial + p.num_splits * to.dk_split_stride;
  to.is_fp32 = 1;
  return to;
}

// The jobs that make dk and dv of the partial sums.
void key_jobs(const MagiBwdParams& p, BwdConvertJob* jobs) {
  const BwdKeyGradients parts = partial_grads(p), to = final_grads(p);
  jobs[0] = {{parts.dk, parts.dk_stride_token, parts.dk_stride_head},
             {to.dk, to.dk_stride_token, to.dk_stride_head},
             parts.dk_split_stride,
             p.num_splits,
             p.num_k,
             p.num_heads_kv,
             p.head_dim,
             to.is_fp32};
  jobs[1] = {{parts.dv, parts.dv_stride_token, parts.dv_stride_head},
             {to.dv, to.dv_stride_token, to.dv_stride_head},
             parts.dv_split_stride,
             p.num_splits,
             p.num_k,
             p.num_heads_kv,
             p.value_dim,
             to.is_fp32};
}

// The ticket and the counters of deterministic mode; those of stored parts stand behind them.
size_t num_semaphores(const MagiBwdParams& p) {
  if (p.in_turns) return 1;
  return p.deterministic ? 1 + size_t{2} * p.num_heads_q * p.num_row_groups : 0;
}

// Counters of stored parts.
size_t num_stored(const MagiBwdParams& p) {
  if (!p.in_turns) return 0;
  return size_t{1} * p.num_tiles * std::max(1, p.lanes_per_section / p.num_splits);
}

// True if each split has partial sums, which another kernel adds up.
bool has_partial_sums(const MagiBwdParams& p) {
  return p.num_splits > 1 && !p.in_turns;
}

// The polynomial holds for logits from -reach to reach (in log2). A row may use it if its lse is at
// most `reach`, so that no logit is above, and at least kNegligible - reach, so that a logit below
// -reach has a probability below 2^-kNegligible.
constexpr float kNegligible = 20.f;
void set_polynomial(BwdArgs* args) {
  args->cap_polynomial = make_cap_polynomial(args->cap_scale, 1.0);
  const float reach = args->cap_log2 * static_cast<float>(std::tanh(kTanhBound));
  args->least_moderate = kNegligible - reach;
  args->most_moderate = args->cap_polynomial.bound > 0.f ? reach : -INFINITY;
}

BwdArgs main_args(const MagiBwdParams& p) {
  BwdArgs args{};
  args.stats = static_cast<const uint4*>(p.stats);
  args.stat_rows = bwd_stat_rows(p.num_q);
  args.stat_kind_stride = int64_t{p.num_heads_q} * args.stat_rows;
  args.heads_inner = p.heads_inner;
  args.descending = p.descending;
  args.items = reinterpret_cast<const BwdItem*>(p.items);
  args.entries = reinterpret_cast<const BwdEntry*>(p.entries);
  args.places = reinterpret_cast<const BwdPlace*>(p.places);
  args.turns = reinterpret_cast<const BwdTurn*>(p.turns);
  args.segments = reinterpret_cast<const BwdSegment*>(p.segments);
  args.blocks = {p.num_items, p.num_splits, p.lanes_per_section, p.whole_heads,
                 p.num_heads_q / p.num_heads_kv / p.num_splits};
  args.semaphores = p.semaphores;
  args.sums = p.in_turns ? reinterpret_cast<float4*>(p.partial) : nullptr;
  args.parts_stored = p.semaphores + num_semaphores(p);
  args.num_heads_q = p.num_heads_q;
  args.num_row_groups = p.num_row_groups;
  args.softmax_scale = p.softmax_scale;
  args.scale_log2 = p.softmax_scale * kLog2e;
  args.cap_scale = p.softcap > 0.f ? p.softmax_scale / p.softcap : 0.f;
  args.cap_log2 = p.softcap * kLog2e;
  if (p.softcap > 0.f) set_polynomial(&args);
  args.grads = has_partial_sums(p) ? partial_grads(p) : final_grads(p);
  return args;
}

// Has the prepare kernel clear a little memory, which spares the host a launch, and the driver
// clear more, whose fill runs at full bandwidth (docs/design/history.md).
constexpr size_t kMostClearedInKernel = 16 << 20;  // bytes
Status clear(void* data, size_t num_words, BwdCleared* in_kernel, cudaStream_t stream) {
  if (num_words * 4 > kMostClearedInKernel)
    return cuda_status(cudaMemsetAsync(data, 0, num_words * 4, stream), "backward, clear");
  *in_kernel = {static_cast<uint32_t*>(data), static_cast<int64_t>(num_words)};
  return {};
}

// Arguments of the kernels of one pass.
struct BwdPass {
  BwdPrepareArgs prepare;
  BwdMaps maps;
  BwdArgs main;
  BwdConvertArgs convert;
  KernelChain chain;
};

template <int kDtype, int kValueDim>
Status prepare(const MagiBwdParams& p, BwdPass* pass) {
  const auto stream = static_cast<cudaStream_t>(p.stream);
  BwdPrepareArgs& args = pass->prepare;
  const size_t sums = p.clear_dq ? size_t{1} * p.num_q * p.num_heads_q * p.head_dim : 0;
  MAGI_RETURN_IF_ERROR(clear(p.dq_acc.data, sums, &args.cleared[0], stream));
  const size_t counters = num_semaphores(p) + num_stored(p);
  MAGI_RETURN_IF_ERROR(clear(p.semaphores, counters, &args.cleared[1], stream));
  args.out = p.out;
  args.dout = p.dout;
  args.lse = p.lse;
  args.delta = p.delta;
  args.stats = static_cast<uint4*>(p.stats);
  args.lse_stride_token = p.lse_stride_token;
  args.lse_stride_head = p.lse_stride_head;
  args.delta_stride_token = p.delta_stride_token;
  args.delta_stride_head = p.delta_stride_head;
  args.num_q = p.num_q;
  args.num_heads_q = p.num_heads_q;
  args.stat_rows = bwd_stat_rows(p.num_q);
  args.softmax_scale = p.softmax_scale;
  const bool scales_p = bwd_scales_p(p.head_dim, p.dtype == kMagiBf16, p.softcap > 0.f);
  args.log_of_factor = scales_p ? std::log(p.softmax_scale) : 0.f;
  const auto add = p.softcap > 0.f ? add_bwd_prepare<kDtype, kValueDim, true>
                                   : add_bwd_prepare<kDtype, kValueDim, false>;
  add(&args, &pass->chain);
  return {};
}

template <int kDtype, int kHeadDim, int kValueDim, bool kSoftcap>
auto main_kernel(const MagiBwdParams& p) {
  return p.deterministic ? add_bwd_main<kDtype, kHeadDim, kValueDim, true, kSoftcap>
                         : add_bwd_main<kDtype, kHeadDim, kValueDim, false, kSoftcap>;
}

template <int kDtype, int kHeadDim, int kValueDim>
Status compute(const MagiBwdParams& p, int num_blocks, BwdPass* pass) {
  MAGI_RETURN_IF_ERROR(encode_maps(p, &pass->maps));
  pass->main = main_args(p);
  const auto add = p.softcap > 0.f ? main_kernel<kDtype, kHeadDim, kValueDim, true>(p)
                                   : main_kernel<kDtype, kHeadDim, kValueDim, false>(p);
  return cuda_status(add(&pass->maps, &pass->main, num_blocks, &pass->chain),
                     "this GPU does not give the backward kernel its shared memory");
}

template <int kDtype, int kHeadDim, int kValueDim>
void convert(const MagiBwdParams& p, BwdPass* pass) {
  BwdConvertArgs& args = pass->convert;
  if (p.dq.data != nullptr)
    args.jobs[args.num_jobs++] = {p.dq_acc, p.dq, 0, 1, p.num_q, p.num_heads_q, p.head_dim, false};
  if (has_partial_sums(p) && p.num_k > 0) {
    key_jobs(p, args.jobs + args.num_jobs);
    args.num_jobs += 2;
  }
  add_bwd_convert<kDtype, kHeadDim, kValueDim>(&args, &pass->chain);
}

template <int kDtype, int kHeadDim, int kValueDim>
Status launch(const MagiBwdParams& p) {
  BwdPass pass{};
  const int split_heads = p.num_heads_kv - p.whole_heads;
  const int num_blocks = p.num_items * (p.whole_heads + split_heads * p.num_splits);
  if (p.num_q > 0) MAGI_RETURN_IF_ERROR((prepare<kDtype, kValueDim>(p, &pass)));
  if (num_blocks > 0)
    MAGI_RETURN_IF_ERROR((compute<kDtype, kHeadDim, kValueDim>(p, num_blocks, &pass)));
  convert<kDtype, kHeadDim, kValueDim>(p, &pass);
  return cuda_status(pass.chain.launch(static_cast<cudaStream_t>(p.stream)),
                     "launch of the backward kernels");
}

struct Variant {
  int dtype, head_dim, value_dim;
  Status (*run)(const MagiBwdParams&);
  cudaError_t (*delta)(const MagiDeltaParams&, cudaStream_t);
  void (*list)(KernelList*);
};

template <int kDtype, int kHeadDim, int kValueDim>
void list(KernelList* kernels) {
  list_bwd_main<kDtype, kHeadDim, kValueDim, false>(kernels);
  list_bwd_main<kDtype, kHeadDim, kValueDim, true>(kernels);
  list_bwd<kDtype, kHeadDim, kValueDim>(kernels);
}

template <int kDtype, int kHeadDim, int kValueDim>
constexpr Variant variant() {
  return {kDtype,
          kHeadDim,
          kValueDim,
          launch<kDtype, kHeadDim, kValueDim>,
          run_bwd_delta<kDtype, kValueDim>,
          list<kDtype, kHeadDim, kValueDim>};
}

constexpr size_t kNumWidths = std::size(kCompiledWidths);

template <size_t... i>
constexpr std::array<Variant, 2 * kNumWidths> all_variants(std::index_sequence<i...>) {
  return {variant<kMagiBf16, kCompiledWidths[i].head_dim, kCompiledWidths[i].value_dim>()...,
          variant<kMagiFp16, kCompiledWidths[i].head_dim, kCompiledWidths[i].value_dim>()...};
}

// The instances that are launched, and loaded early.
constexpr auto kVariants = all_variants(std::make_index_sequence<kNumWidths>{});

Status launch_bwd(const MagiBwdParams& p) {
  MAGI_RETURN_IF_ERROR(check(p));
  for (const Variant& v : kVariants)
    if (v.dtype == p.dtype && v.head_dim == p.head_dim && v.value_dim == p.value_dim)
      return v.run(p);
  return {kUnsupported, "no backward kernel for dtype code " + std::to_string(p.dtype) +
                            ", head_dim " + std::to_string(p.head_dim) + " and value_dim " +
                            std::to_string(p.value_dim) +
                            "; compiled are bf16 and fp16, head_dim " + compiled_widths_text()};
}

Status launch_delta(const MagiDeltaParams& p) {
  for (const Variant& v : kVariants)
    if (v.dtype == p.dtype && v.value_dim == p.value_dim)
      return cuda_status(v.delta(p, static_cast<cudaStream_t>(p.stream)), "backward, delta kernel");
  return {kUnsupported, "no delta kernel for dtype code " + std::to_string(p.dtype) +
                            " and value_dim " + std::to_string(p.value_dim) +
                            "; compiled are bf16 and fp16, head_dim " + compiled_widths_text() +
                            "; compute it in PyTorch"};
}

}  // namespace

void list_bwd_kernels(KernelList* kernels) {
  for (const Variant& v : kVariants) v.list(kernels);
}

}  // namespace magi

MAGI_EXPORT int magi_attn_bwd(const MagiBwdParams* params, char* message, int message_bytes) {
  return magi::report(magi::launch_bwd(*params), message, message_bytes);
}

MAGI_EXPORT int magi_row_delta(const MagiDeltaParams* params, char* message, int message_bytes) {
  return magi::report(magi::launch_delta(*params), message, message_bytes);
}
