"""Classes of quantized tensors, of which there are never any: Megatron asks tensors for them."""

from __future__ import annotations

import torch


class QuantizedTensor(torch.Tensor):
    """Any quantized tensor."""
