// In place of CUDA's header; see runtime.h.
#pragma once

enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_NOT_INITIALIZED = 3 };
struct CUctx_st;
using CUcontext = CUctx_st*;
