"""Forward and backward under MagiAttention's names for FA4, against one differentiable call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_magi import magi_attention as api

LENGTHS = (23, 31)
CODES = [1, 0, 3]
Q_ROWS, K_ROWS = [[0, 9], [9, 15], [15, 23]], [[0, 9], [4, 20], [10, 31]]


def mask() -> api.FA4AttnArg:
    rows = (api.AttnRanges.from_ranges(x) for x in (Q_ROWS, K_ROWS))
    return api.FA4AttnArg(*rows, CODES, *LENGTHS, headdim=8)


def inputs() -> list[Tensor]:
    """q, k, v and the gradient of out."""
    generator = torch.Generator().manual_seed(1)
    sizes = [(LENGTHS[0], 4), (LENGTHS[1], 2), (LENGTHS[1], 2), (LENGTHS[0], 4)]
    return [torch.randn(*n, 8, generator=generator, dtype=torch.float64) for n in sizes]


@pytest.mark.parametrize("numbers", [{}, {"softmax_scale": 0.7, "softcap": 1.5}])
def test_both_give_what_the_differentiable_call_gives(numbers: dict[str, float]) -> None:
    q, k, v, do = inputs()
    out, lse = api.fa4_fwd(q, k, v, None, mask(), **numbers)
    grads = api.fa4_bwd(do, q, k, v, None, out, lse, mask(), **numbers)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    ranges = [torch.tensor(x, dtype=torch.int32) for x in (Q_ROWS, K_ROWS, CODES)]
    want, meta = api.flex_flash_attn_func(*leaves, *ranges, **numbers)
    torch.testing.assert_close((out, lse), (want.detach(), meta.lse.detach()))
    torch.testing.assert_close(grads[:3], torch.autograd.grad(want, leaves, do))
    assert grads[3] is None and not out.requires_grad


def test_a_sink_joins_the_forward_and_is_refused_in_the_backward() -> None:
    q, k, v, do = inputs()
    sink = torch.zeros(1, 4, dtype=torch.float64)
    out, lse = api.fa4_fwd(q, k, v, sink, mask())
    assert (lse > api.fa4_fwd(q, k, v, None, mask())[1]).all()
    with pytest.raises(NotImplementedError, match="needs sink=None, got a tensor"):
        api.fa4_bwd(do, q, k, v, sink, out, lse, mask())


def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


INTEGERS = {
    name: zeros(n, h, 8).long() for name, n, h in (("q", 23, 4), ("k", 31, 2), ("v", 31, 2))
}


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"q": zeros(5, 4, 8)}, ValueError, "23 and 31 tokens of attn_arg, got 5 and 31"),
        ({"q": zeros()}, ValueError, r"q must be \[tokens, heads, head_dim\], got \[\]"),
        ({"q": zeros(23, 8)}, ValueError, r"q must be .*, got \[23, 8\]"),
        ({"k": zeros(31, 2, 8).bfloat16()}, TypeError, "k must .* share q's dtype"),
        ({"k": zeros(31, 3, 8), "v": zeros(31, 3, 8)}, ValueError, "multiple of the key/value"),
        ({"v": zeros(4, 2, 8)}, ValueError, "k and v must have equal tokens"),
        (INTEGERS, TypeError, "q must be fp16, bf16, fp32 or fp64"),
        ({"attn_arg": None}, TypeError, "attn_arg must be"),
        ({"lse": zeros(4, 23)}, ValueError, r"lse .* \[23, 4\] .* got \[4, 23\]; .*pass o and lse"),
        (
            {"lse": zeros(23, 4).float()},
            TypeError,
            "lse must be torch.float64 .* got torch.float32",
        ),
        ({"lse": zeros(23, 4).to("meta")}, ValueError, "lse .* on q's device cpu, got .* on meta"),
        ({"o": None}, TypeError, "o must be a Tensor, got None"),
        ({"do": zeros(23, 4, 8).long()}, TypeError, "do must be .* got torch.int64"),
        ({"do": zeros(23, 4, 6), "o": zeros(23, 4, 6)}, ValueError, r"do .* got \[23, 4, 6\]"),
        (
            {"do": zeros(23, 2, 8), "o": zeros(23, 2, 8), "lse": zeros(23, 2)},
            ValueError,
            r"do must have the shape \[23, 4, 8\] .* got \[23, 2, 8\]",
        ),
        ({"softcap": -1.0}, ValueError, "softcap"),
    ],
)
def test_what_does_not_fit(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    q, k, v, do = inputs()
    out, lse = api.fa4_fwd(q, k, v, None, mask())
    given = {"do": do, "q": q, "k": k, "v": v, "sink": None, "o": out, "lse": lse}
    with pytest.raises(error, match=message):
        api.fa4_bwd(**{**given, "attn_arg": mask(), **changes})


@pytest.mark.parametrize(
    "codes, error, message",
    [
        (None, TypeError, "attn_type_map must be .*, got None; pass a code from 0 to 3"),
        (1, TypeError, "attn_type_map must be .*, got 1; pass a code"),
        (torch.tensor(1), ValueError, "attn_type_map must be one row of integers"),
        ([1, 4, 0], ValueError, "between 0 and 3, got 4"),
    ],
)
def test_what_are_no_types(codes: Any, error: type[Exception], message: str) -> None:
    rows = (api.AttnRanges.from_ranges(x) for x in (Q_ROWS, K_ROWS))
    with pytest.raises(error, match=message):
        api.FA4AttnArg(*rows, codes, *LENGTHS)
