// The arguments of the gradient of sinks, as they cross the C ABI; core/cuda/abi.py mirrors them.
// Conventions and letters are those of ../params.h; all arrays are contiguous.
#pragma once
#include "../params.h"

// g[t, h] = -exp(sink_lse - lse[t, h]) * delta[t, h]. Per token that is the gradient of sink_lse;
// for sinks that all tokens share, block b adds up what its tokens give.
struct MagiSinkParams {
  const float* sink_lse;  // [T, H] if per token, else [H]
  const float* lse;       // [T, H], which the sinks have joined
  const float* delta;     // [T, H] rowsum(out * dout), less the gradient of lse
  float* grad;            // [T, H] if per token, else [num_blocks, H]
  void* stream;           // host: cudaStream_t
  int32_t num_tokens, num_heads;
  int32_t num_blocks;
  int32_t per_token;
};
