"""``flex_flash_attn_func``: attention on one device over any set of slices."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_magi.checks import flag, instance, word
from megatron_magi.core.kernel.autograd import refuse_tangents
from megatron_magi.core.kernel.backend import acc_dtype
from megatron_magi.core.kernel.call_key import call_key
from megatron_magi.core.kernel.given_slices import SliceRanges, checked_slices
from megatron_magi.core.kernel.op import AttnOptions, AttnRequest, attend, lookup_prepared
from megatron_magi.core.kernel.qkv_checks import FLOAT_DTYPES, check_qkv
from megatron_magi.core.kernel.select import BACKENDS
from megatron_magi.core.kernel.sink import sink_lse_of
from megatron_magi.core.kernel.softmax import check_softmax, scale_for
from megatron_magi.core.mask import AttnMask
from megatron_magi.core.tensor_checks import tensor


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
    plain = sink is None and q_ranges is None and k_ranges is None and attn_type_map is None
    key = None if slices is None or not plain else _key(q, k, v, slices, given)
    request = None if slices is None or key is None else lookup_prepared(slices, key)
    if request is None:
        check_qkv(q, k, v)
        options = GivenOptions(*given).checked(q, sink)
        ranges = SliceRanges(q_ranges, k_ranges, attn_type_map)
        request = AttnRequest(checked_slices(slices, ranges, q.shape[0], k.shape[0]), options, key)
    refuse_tangents(q, k, v, *(() if sink is None else (sink,)))
    most = no_logits(q) if flag(return_max_logits, "return_max_logits") else None
    out, lse = attend(q, k, v, request, most)
    return out, AttnForwardMeta(lse, most)


class GivenOptions(NamedTuple):
    """Options of a call as its caller gave them."""

    softmax_scale: float | None
    softcap: float
    deterministic: bool
    backend: str
    out_dtype: torch.dtype | None

    def checked(self, q: Tensor, sink: Tensor | None) -> AttnOptions:
        """The options of a call on these queries.

        Raises:
            TypeError, ValueError: an option that no call takes.
        """
        check_softmax(self.softmax_scale, self.softcap, sink)
        return AttnOptions(
            scale_for(self.softmax_scale, q),
            q.dtype if self.out_dtype is None else _float_dtype(self.out_dtype),
            word(self.backend, "backend", BACKENDS),
            flag(self.deterministic, "deterministic"),
            float(self.softcap),
            sink_lse_of(sink, q),
        )


def _key(
    q: Tensor, k: Tensor, v: Tensor, slices: Tensor | AttnMask, given: tuple[object, ...]
) -> Hashable:
    """The key of a call (see call_key.py). None: the call is checked every time, because one of
    its types is rare or wrong, or because it is compiled.

    Args:
        given: the fields of `GivenOptions`, which takes longer to make than its hash.
    """
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


def _float_dtype(dtype: torch.dtype) -> torch.dtype:
    instance(dtype, torch.dtype, "out_dtype", "pass one such as torch.float32, or None")
    if dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"out_dtype must be fp16, bf16, fp32 or fp64, got {dtype}; cast the result instead"
        )
    return dtype


def no_logits(q: Tensor) -> Tensor:
    """[H] in the accumulation dtype: -inf, what ``AttnCall.max_logits`` begins with."""
    return torch.full((q.shape[1],), -torch.inf, dtype=acc_dtype(q.dtype), device=q.device)
