"""``flex_flash_attn_func``: attention on one device over any set of slices."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_magi.checks import flag, instance, word
from megatron_magi.core.kernel.autograd import refuse_tangents
from megatron_magi.core.kernel.backend import acc_dtype
from megatron_magi.core.kernel.call_key import call_key
from megatron_magi.core.kernel.op import AttnOptions, AttnRequest, attend, lookup_prepared
from megatron_magi.core.kernel.select import BACKENDS
from megatron_magi.core.kernel.sink import sink_lse_of
from megatron_magi.core.kernel.slice_table import ByIdentity, tensor_of_mask
from megatron_magi.core.kernel.softmax import check_softmax, scale_for
from megatron_magi.core.mask import AttnMask
from megatron_magi.core.mask.slices import slices_from_ranges
from megatron_magi.core.tensor_checks import on_host, tensor

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class AttnForwardMeta:
    """Results of attention besides ``out``."""

    lse: Tensor
    """[T, H] natural log of the sum of exp of logits, sinks included; -inf where a row sees nothing
    and there are no sinks."""
    max_logits: Tensor | None = None
    """[H] largest logit of every head; None unless asked for."""

    def __post_init__(self) -> None:
        tensor(self.lse, "lse")
        if self.max_logits is not None:
            tensor(self.max_logits, "max_logits")


def flex_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ranges: Tensor | None = None,
    k_ranges: Tensor | None = None,
    attn_type_map: Tensor | None = None,
    *,
    slices: Tensor | AttnMask | None = None,
    softmax_scale: float | None = None,
    deterministic: bool = False,
    backend: str = "auto",
    out_dtype: torch.dtype | None = None,
    return_max_logits: bool = False,
    softcap: float = 0.0,
    sink: Tensor | None = None,
) -> tuple[Tensor, AttnForwardMeta]:
    """Attention in which a query sees the keys that the slices show it; differentiable.

    Rows that see nothing give out 0, zero gradients and an lse of -inf, or with sinks that of the
    sinks. A row that sees a score of nan or
    inf, or only scores of -inf, has no softmax: its out and lse are nan.

    Args:
        q: [T, H, D] fp16, bf16, fp32 or fp64; strided, last dimension contiguous.
        k: [S, G, D], dtype and device of q; H must be a multiple of G.
        v: [S, G, E], likewise; E may differ from D (multi-latent attention).
        q_ranges, k_ranges: integer [N, 2], half-open; None (with ``slices`` None): full attention.
        attn_type_map: integer [N], codes 0 FULL, 1 CAUSAL, 2 INV_CAUSAL, 3 BI_CAUSAL; None: FULL.
        slices: instead of ranges, an AttnMask or int32 [N, 6] (see ``slices_tensor``). Pass the
            same object to every call, so that it is validated and turned into work lists once.
            Changes in place are noticed, but not writes through numpy or to ``.data``, which torch
            does not count: after those, pass a clone. The same holds for ranges and types.
        softmax_scale: None: 1 / sqrt(D).
        deterministic: gradients with equal bits from run to run.
        backend: "auto", "cuda" (Hopper, D and E to 256), "fa4" (FlashAttention-4 on Hopper and
            Blackwell, D and E to 128), "flex" (FlexAttention) or "reference" (PyTorch).
        out_dtype: of out; None: as q.
        return_max_logits: find each head's largest visible logit ("cuda", "reference").
        softcap: above 0, logits are softcap * tanh(scaled score / softcap); 0: scaled scores.
        sink: learnable logits without values that join every row's softmax, finite, any float
            dtype: [s, H] for all rows, or [T, s, H] per token. They are not capped, and max_logits
            leaves them out.

    Returns:
        out: [T, H, E] and AttnForwardMeta with lse [T, H] and max_logits [H] or None, both fp32
        (fp64 for fp64 inputs).

    Raises:
        TypeError, ValueError: inputs that do not fit, named with the remedy.
        NotImplementedError: a backend that cannot run here, inputs with forward-mode tangents or
            whose gradient a transform of torch.func asks for, or ``return_max_logits`` with "flex"
            or "fa4", or under torch.compile.
        RuntimeError: in backward, a second derivative.

    Cost: ranges or slices given as CUDA tensors are copied to the host when first seen.
    """
    given = softmax_scale, softcap, deterministic, backend, out_dtype
    ranges = q_ranges, k_ranges, attn_type_map
    plain = sink is None and q_ranges is None and k_ranges is None and attn_type_map is None
    key = None if slices is None or not plain else _key(q, k, v, slices, given)
    asked = None if slices is None or key is None else lookup_prepared(slices, key)
    if asked is None:
        options = _checked_options((q, k, v), sink, given)
        checked = _checked_slices(slices, ranges, q.shape[0], k.shape[0])
        asked = AttnRequest(checked, options, key)
    refuse_tangents(q, k, v, *(() if sink is None else (sink,)))
    most = no_logits(q) if flag(return_max_logits, "return_max_logits") else None
    out, lse = attend(q, k, v, asked, most)
    return out, AttnForwardMeta(lse, most)


Given = tuple[Any, ...]
"""softmax_scale, softcap, deterministic, backend and out_dtype of a call."""
Ranges = tuple[Tensor | None, Tensor | None, Tensor | None]
"""q_ranges, k_ranges and attn_type_map."""
RANGES = ("q_ranges", "k_ranges", "attn_type_map")


def _key(q: Tensor, k: Tensor, v: Tensor, slices: Tensor | AttnMask, given: Given) -> Hashable:
    """The key of a call (see call_key.py). None: the call is checked every time, because one of
    its types is rare or wrong, or because it is compiled."""
    scale, softcap, deterministic, backend, out_dtype = given
    usual = (
        (type(q) is type(k) is type(v) is Tensor)
        and (scale is None or type(scale) is float)
        and (type(softcap) is float and type(deterministic) is bool and type(backend) is str)
        and (out_dtype is None or type(out_dtype) is torch.dtype)
    )
    if not usual or torch.compiler.is_compiling():
        return None
    eager = type(slices) is AttnMask or (type(slices) is Tensor and not slices.is_inference())
    return (call_key(q, k, v), given) if eager else None


def _checked_options(
    qkv: tuple[Tensor, Tensor, Tensor], sink: Tensor | None, given: Given
) -> AttnOptions:
    scale, softcap, deterministic, backend, out_dtype = given
    check_qkv(*qkv)
    check_softmax(scale, softcap, sink)
    q = qkv[0]
    return AttnOptions(
        scale_for(scale, q),
        q.dtype if out_dtype is None else _float_dtype(out_dtype),
        word(backend, "backend", BACKENDS),
        flag(deterministic, "deterministic"),
        float(softcap),
        sink_lse_of(sink, q),
    )


def _checked_slices(
    slices: Tensor | AttnMask | None, ranges: Ranges, num_q: int, num_k: int
) -> Tensor:
    """int32 [N, 6] of the slices that were given, or of the ranges."""
    if slices is None:
        return _slices_of_ranges(*ranges, num_q, num_k)
    if any(x is not None for x in ranges):
        raise ValueError(
            "pass either slices or q_ranges, k_ranges and attn_type_map, got both; drop one"
        )
    if isinstance(slices, AttnMask):
        _check_lengths(slices, num_q, num_k)
        return tensor_of_mask(slices)
    _check_slices(slices)
    return slices


def no_logits(q: Tensor) -> Tensor:
    """[H] in the accumulation dtype: -inf, what ``AttnCall.max_logits`` begins with."""
    return torch.full((q.shape[1],), -torch.inf, dtype=acc_dtype(q.dtype), device=q.device)


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


def _float_dtype(dtype: torch.dtype) -> torch.dtype:
    instance(dtype, torch.dtype, "out_dtype", "pass one such as torch.float32, or None")
    if dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"out_dtype must be fp16, bf16, fp32 or fp64, got {dtype}; cast the result instead"
        )
    return dtype


def _check_lengths(mask: AttnMask, num_q: int, num_k: int) -> None:
    if (mask.total_seqlen_q, mask.total_seqlen_k) != (num_q, num_k):
        raise ValueError(
            f"the mask must be for q's {num_q} and k's {num_k} tokens, got one with "
            f"total_seqlen_q = {mask.total_seqlen_q} and total_seqlen_k = {mask.total_seqlen_k}; "
            f"build it for these lengths"
        )


def _check_slices(slices: Tensor) -> None:
    instance(slices, (Tensor, AttnMask), "slices", "make them with slices_tensor(mask)")
    tensor(slices, "slices")
    if slices.dtype != torch.int32 or slices.ndim != 2 or slices.shape[1] != 6:
        raise ValueError(
            f"slices must be int32 [num_slices, 6], got {slices.dtype} {list(slices.shape)}; "
            f"make them with slices_tensor(mask)"
        )


_range_tensors: ByIdentity[tuple[Hashable, object, Tensor]] = ByIdentity()


def _slices_of_ranges(
    q_ranges: Tensor | None,
    k_ranges: Tensor | None,
    attn_type_map: Tensor | None,
    num_q: int,
    num_k: int,
) -> Tensor:
    """int32 [N, 6] of the ranges, remembered by the objects and their versions."""
    if q_ranges is None and k_ranges is None and attn_type_map is None:
        q_ranges, k_ranges = (torch.tensor([[0, n]], device="cpu") for n in (num_q, num_k))
    if q_ranges is None or k_ranges is None:
        raise ValueError(
            "q_ranges and k_ranges must both be given, got only one of them; "
            "leave both out for full attention"
        )
    parts = (q_ranges, k_ranges, attn_type_map)
    named = list(zip(RANGES, parts, strict=True))
    for name, x in named:
        if x is not None:
            tensor(x, name)
    is_cacheable = not any(x is not None and x.is_inference() for x in parts)
    key = None
    if is_cacheable:
        key = tuple((id(x), 0 if x is None else x._version) for x in parts)
    seen = _range_tensors.get(q_ranges)
    if seen is not None and seen[0] == key:
        return seen[2]
    host = [
        None if x is None else np.asarray(on_host(x, n)) for n, x in zip(RANGES, parts, strict=True)
    ]
    with torch.inference_mode(False):  # autograd may save it later
        made = torch.from_numpy(slices_from_ranges(*host))  # type: ignore[arg-type]
    if is_cacheable:
        # The other objects are kept alive so that their ids are not reused. The entry's own key is
        # not kept alive, or the entry would live for ever.
        others = [x for x in parts if x is not q_ranges]
        _range_tensors[q_ranges] = key, others, made
    return made
