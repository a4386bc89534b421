"""The gradient of sinks, from lse and delta: by a kernel of ours on Hopper, else in PyTorch.

T query tokens, H query heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_magi.core.cuda.abi import SinkParams
from megatron_magi.core.cuda.library import (
    CudaLibrary,
    loaded_cuda_library,
    on_device,
    stream_handle,
)
from megatron_magi.core.kernel.autograd import needs_dispatcher

MOST_BLOCKS = 128
"""The most partial sums that the kernel makes for shared sinks; PyTorch adds them up."""
TOKENS_OF_A_BLOCK = 8
"""Tokens that a block takes at a time: kSinkTokens of csrc/attention/sink/launch.cu."""


def sink_gradient(sink_lse: Tensor | None, lse_TH: Tensor, delta_TH: Tensor) -> Tensor | None:
    """The gradient of ``AttnCall.sink_lse``, in its shape; None without sinks. Its bits are equal
    from run to run.

    A sink is a logit whose value is 0, so its gradient is minus its weight times delta.

    Args:
        lse_TH: the final lse, which the sinks have joined.
        delta_TH: the row sum of out * dout, less the gradient of lse.
    """
    if sink_lse is None:
        return None
    library = _library_for(sink_lse, lse_TH, delta_TH)
    if library is not None:
        return _by_kernel(library, sink_lse, lse_TH, delta_TH)
    grad_TH = (sink_lse - lse_TH).exp_().mul_(delta_TH).neg_()
    return grad_TH if sink_lse.ndim == 2 else grad_TH.sum(0)


def _by_kernel(library: CudaLibrary, sink_lse: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    tokens, heads = lse.shape
    per_token = sink_lse.ndim == 2
    blocks = min(MOST_BLOCKS, -(-tokens // TOKENS_OF_A_BLOCK))
    grad = lse.new_empty(tokens if per_token else blocks, heads)
    inputs = [x.contiguous() for x in (sink_lse, lse, delta)]  # held until the launch
    addresses = (x.data_ptr() for x in (*inputs, grad))
    params = SinkParams(*addresses, stream_handle(lse.device), tokens, heads, blocks, per_token)
    with on_device(lse.device):
        library.call("magi_sink_gradient", params)
    return grad if per_token else grad.sum(0)


def _library_for(*tensors: Tensor) -> CudaLibrary | None:
    """The CUDA library if it is loaded and takes these tensors."""
    library = loaded_cuda_library(tensors[0].device)
    if library is None or needs_dispatcher(*tensors):
        return None
    fits = all(x.dtype == torch.float32 and x.numel() > 0 for x in tensors)
    return library if fits else None
