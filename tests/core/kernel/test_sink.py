"""Sinks on (out, lse): values and gradients by their formulas, and what is no sink."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_magi.core.kernel.sink import SINK_LAYOUTS, apply_sink, check_layout

FP64 = torch.float64


def attended(tokens: int = 6, heads: int = 3, dim: int = 5) -> tuple[Tensor, Tensor]:
    """Some (out, lse); the last row sees nothing."""
    generator = torch.Generator().manual_seed(tokens)
    out = torch.randn(tokens, heads, dim, generator=generator, dtype=FP64)
    lse = torch.randn(tokens, heads, generator=generator, dtype=FP64) * 3
    out[-1], lse[-1] = 0.0, -torch.inf
    return out, lse


def sinks(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=FP64)


@pytest.mark.parametrize("layout, shape", [("sh", (2, 3)), ("sh", (1, 3)), ("ssh", (6, 4, 3))])
def test_sinks_are_keys_without_values(layout: str, shape: tuple[int, ...]) -> None:
    """By the sums of the exponentials themselves."""
    (out, lse), sink = attended(), sinks(*shape)
    sums = lse.exp() + sink.exp().sum(-2)
    got, got_lse = apply_sink(out, lse, sink, layout)
    torch.testing.assert_close(got_lse, sums.log())
    torch.testing.assert_close(got, out * (lse.exp() / sums).unsqueeze(-1))


def test_sh_is_the_layout_that_is_not_named() -> None:
    out, lse = attended()
    got, want = apply_sink(out, lse, sinks(2, 3)), apply_sink(out, lse, sinks(2, 3), "sh")
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    each = apply_sink(out, lse, sinks(2, 3).expand(6, 2, 3), "ssh")
    torch.testing.assert_close(each, got, rtol=1e-14, atol=1e-14)


def test_a_row_that_sees_nothing_has_the_sinks_alone() -> None:
    (out, lse), sink = attended(), sinks(2, 3)
    inputs = [x.requires_grad_() for x in (out, lse, sink)]
    got, got_lse = apply_sink(*inputs)
    assert (got[-1] == 0).all()
    torch.testing.assert_close(got_lse[-1], sink.logsumexp(0))
    grads = torch.autograd.grad([got.sum(), got_lse.sum()], inputs)
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("far", [200.0, -200.0, 1e4, -1e4])
def test_scores_far_from_the_sink_do_not_overflow(far: float) -> None:
    out, lse = attended()
    got, got_lse = apply_sink(out, lse + far, sinks(1, 3))
    alone = lse.isneginf()
    want, want_lse = (out, lse + far) if far > 0 else (out * 0, sinks(1, 3).expand(6, 3))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got_lse[~alone], want_lse[~alone])


def test_the_gradient_of_a_sink_is_its_share_of_every_row() -> None:
    """Minus the sum over rows of its weight times rowsum(out' dout'), and its weight for lse'."""
    (out, lse), sink = attended(), sinks(2, 3).requires_grad_()
    dout, dlse = torch.randn(6, 3, 5, dtype=FP64), torch.randn(6, 3, dtype=FP64)
    made, made_lse = apply_sink(out, lse, sink)
    weight = (sink.detach()[:, None] - made_lse.detach()).exp()  # [s, T, H]
    delta = (made.detach() * dout).sum(-1)
    (got,) = torch.autograd.grad(made, sink, dout, retain_graph=True)
    torch.testing.assert_close(got, -(weight * delta).sum(1))
    (got,) = torch.autograd.grad(made_lse, sink, dlse)
    torch.testing.assert_close(got, (weight * dlse).sum(1))


def test_gradients_are_those_of_differences() -> None:
    out, lse = attended()
    inputs = [x.requires_grad_() for x in (out[:-1], lse[:-1], sinks(5, 2, 3))]
    assert torch.autograd.gradcheck(lambda *x: apply_sink(*x, "ssh"), inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_out_is_rounded_once_and_lse_stays_in_fp32(dtype: torch.dtype) -> None:
    out, lse = attended()
    sink = sinks(2, 3).to(dtype)
    got, got_lse = apply_sink(out.to(dtype), lse.float(), sink)
    want, want_lse = apply_sink(out.to(dtype).double(), lse.float().double(), sink.double())
    assert (got.dtype, got_lse.dtype) == (dtype, torch.float32)
    bound = want.abs() * torch.finfo(dtype).eps / 2 + 1e-6
    assert ((got.double() - want).abs() <= bound).all()
    torch.testing.assert_close(got_lse.double(), want_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "sink, layout, text",
    [
        (torch.zeros(2), "sh", r"must be \[s, H\] with s >= 1, T = 6 and H = 3, got \[2\]"),
        (torch.zeros(1, 4), "sh", r"got \[1, 4\]; give one logit per sink and query head"),
        (torch.zeros(0, 3), "sh", r"got \[0, 3\]"),
        (torch.zeros(6, 1, 3), "sh", r"must be \[s, H\] .* got \[6, 1, 3\]"),
        (torch.zeros(5, 1, 3), "ssh", r"must be \[T, s, H\] .* got \[5, 1, 3\]"),
        (torch.zeros(6, 0, 3), "ssh", r"got \[6, 0, 3\]"),
        (torch.zeros(6, 3), "ssh", r"must be \[T, s, H\] .* got \[6, 3\]"),
        (torch.zeros(1, 3, dtype=torch.int32), "sh", "float tensor on cpu, got torch.int32 on cpu"),
        (torch.zeros(1, 3, device="meta"), "sh", "float tensor on cpu, got torch.float32 on meta"),
    ],
)
def test_wrong_sinks(sink: Tensor, layout: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        apply_sink(*attended(), sink, layout)


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match=r"sink must be a Tensor, got 3\.0"):
        apply_sink(*attended(), 3.0)  # type: ignore[arg-type]


def test_layouts() -> None:
    check_layout("sh")
    check_layout("ssh")
    assert {"sh", "ssh", "shd"} == set(SINK_LAYOUTS)
    with pytest.raises(NotImplementedError, match=r"without values .* got sink_layout 'shd'; add"):
        check_layout("shd")
    with pytest.raises(NotImplementedError, match="got sink_layout 'shd'"):
        apply_sink(*attended(), sinks(1, 3), "shd")
    for bad in ("hs", "", None, ["sh"]):
        with pytest.raises(ValueError, match=r"'sh' \(\[s, H\]\) or 'ssh' .* got .*; use 'sh' for"):
            check_layout(bad)  # type: ignore[arg-type]
