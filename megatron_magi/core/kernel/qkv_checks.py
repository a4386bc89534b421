"""Checks of queries, keys and values that every kernel needs."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_magi.core.tensor_checks import tensor

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse tensors that no backend could run, in the order device, dtype, shape, stride."""
    if _fit(q, k, v):
        return
    named = (("q", q), ("k", k), ("v", v))
    for name, x in named:
        _check_kind(name, x, q)
    _check_heads(q, k, v)
    for name, x in named:
        if x.shape[2] > 1 and x.stride(2) != 1:
            raise ValueError(
                f"{name} must be contiguous in head_dim, got strides {list(x.stride())}; "
                f"call .contiguous()"
            )


def _fit(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True if `check_qkv` has nothing to refuse, for the usual tensors: without names and remedies,
    which take several times as long."""
    if not (type(q) is type(k) is type(v) is Tensor and q.ndim == k.ndim == v.ndim == 3):
        return False
    if q.is_nested or k.is_nested or v.is_nested:
        return False
    (_, heads, width), (keys, groups, of_keys), (values, of_values, width_v) = (
        q.shape, k.shape, v.shape
    )  # fmt: skip
    device, dtype = q.device, q.dtype
    return (
        (k.device == device and v.device == device)
        and (dtype in FLOAT_DTYPES and k.dtype is dtype and v.dtype is dtype)
        and (keys == values and groups == of_values and of_keys == width > 0 and width_v > 0)
        and (groups > 0 and heads % groups == 0)
        and q.stride(2) == k.stride(2) == v.stride(2) == 1
    )


def _check_kind(name: str, x: Tensor, q: Tensor) -> None:
    """Check device, dtype and number of dimensions."""
    tensor(x, name)
    if x.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got {x.layout}; call .to_dense()")
    if x.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}; move it")
    if x.dtype != q.dtype or x.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"{name} must be fp16, bf16, fp32 or fp64 and share q's dtype {q.dtype}, got "
            f"{x.dtype}; cast it"
        )
    if x.ndim != 3:
        raise ValueError(
            f"{name} must be [tokens, heads, head_dim], got {list(x.shape)}; "
            f"fold the batch into the tokens (documents become slices)"
        )


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check that the heads of three [tokens, heads, head_dim] fit together."""
    if q.shape[2] == 0 or v.shape[2] == 0:
        raise ValueError(
            f"head_dim must be at least 1, got q of shape {list(q.shape)} and v of shape "
            f"{list(v.shape)}; leave out heads without elements"
        )
    if k.shape[:2] != v.shape[:2] or k.shape[2] != q.shape[2]:
        raise ValueError(
            f"k and v must have equal tokens and heads and k q's head_dim {q.shape[2]}, got "
            f"{list(k.shape)} and {list(v.shape)}; pass the key and the value of the same tokens"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"the number of query heads must be a multiple of the key/value heads, got "
            f"{q.shape[1]} and {k.shape[1]}; repeat the key/value heads"
        )
