"""What a sink is to the kernels, and what is no sink."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_magi import masks
from megatron_magi.core.kernel.backend import AttnCall
from megatron_magi.core.kernel.sink import (
    SINK_LAYOUTS,
    check_joins,
    check_layout,
    join_sink_,
    sink_lse_of,
)
from megatron_magi.core.kernel.sink_gradient import sink_gradient
from megatron_magi.core.kernel.slice_table import SliceTable
from tests.dense import with_sinks

FP64 = torch.float64
Q = torch.zeros(6, 3, 4)


def attended() -> tuple[Tensor, Tensor]:
    """Some (out, lse); the last row sees nothing."""
    generator = torch.Generator().manual_seed(6)
    out = torch.randn(6, 3, 5, generator=generator, dtype=FP64)
    lse = torch.randn(6, 3, generator=generator, dtype=FP64) * 3
    out[-1], lse[-1] = 0.0, -torch.inf
    return out, lse


def sinks(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=FP64)


def call_with(sink_lse: Tensor | None, dtype: torch.dtype = FP64) -> AttnCall:
    q = Q.to(dtype)
    return AttnCall(q, q, q, SliceTable(masks.causal(6).slices, 6, 6), 0.5, sink_lse=sink_lse)


@pytest.mark.parametrize("shape", [(1, 3), (2, 3), (3, 3), (8, 3), (6, 1, 3), (6, 5, 3)])
def test_sinks_are_one_logit_to_a_row(shape: tuple[int, ...]) -> None:
    sink = sinks(*shape).requires_grad_()
    made = sink_lse_of(sink, Q.double())
    assert made is not None and made.shape == (*shape[:-2], 3)
    torch.testing.assert_close(made, sink.exp().sum(-2).log())
    assert torch.autograd.gradcheck(lambda x: sink_lse_of(x, Q.double()), [sink])
    assert (made._base is sink) == (shape[-2] == 1), "one sink costs no kernel"


def test_large_sinks_do_not_overflow() -> None:
    far = torch.tensor([[1e4, -1e4, 0.0], [1e4, -1e4, -1e4]], dtype=FP64, requires_grad=True)
    made = sink_lse_of(far, Q.double())
    assert made is not None
    torch.testing.assert_close(made, far.logsumexp(0))
    (grad,) = torch.autograd.grad(made.sum(), far)
    torch.testing.assert_close(grad, torch.tensor([[0.5, 0.5, 1.0], [0.5, 0.5, 0.0]], dtype=FP64))


@pytest.mark.parametrize("q_dtype, dtype", [(torch.bfloat16, torch.float32), (FP64, FP64)])
def test_it_has_the_accumulation_dtype_of_the_call(
    q_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    for given in (torch.float16, torch.float32, FP64):
        sink = torch.ones(2, 3, dtype=given, requires_grad=True)
        made = sink_lse_of(sink, Q.to(q_dtype))
        assert made is not None and made.dtype == dtype
        made.sum().backward()
        assert sink.grad is not None and sink.grad.dtype == given


def test_a_checkpoint_may_recompute_it_below_a_dispatch_mode() -> None:
    """Both ways save the same tensors, in one order."""

    def saved(sink: Tensor, directly: bool) -> list[Tensor]:
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            sink_lse_of(sink, Q.double()) if directly else sink.logsumexp(-2)
        return kept

    sink = sinks(4, 3).requires_grad_()
    ours, theirs = saved(sink, True), saved(sink, False)
    assert len(ours) == len(theirs) == 2
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("shape", [(2, 3), (1, 3), (6, 4, 3)])
def test_joining_adds_to_the_sums(shape: tuple[int, ...]) -> None:
    out, lse = attended()
    want = with_sinks(out.clone(), lse.clone(), sinks(*shape))
    got = join_sink_(out, lse, call_with(sink_lse_of(sinks(*shape), Q.double())))
    assert got[0] is out and got[1] is lse, "in place"
    torch.testing.assert_close(got, want)
    assert (out[-1] == 0).all() and lse.isfinite().all()


def test_without_sinks_nothing_is_done() -> None:
    assert sink_lse_of(None, Q) is None and sink_gradient(None, Q, Q) is None
    out, lse = attended()
    got = join_sink_(out.clone(), lse.clone(), call_with(None))
    assert torch.equal(got[0], out) and torch.equal(got[1], lse)


@pytest.mark.parametrize("far", [200.0, -200.0, 1e4, -1e4])
def test_scores_far_from_the_sink_do_not_overflow(far: float) -> None:
    out, lse = attended()
    sink = sinks(1, 3)
    alone = lse.isneginf()
    want, want_lse = (out, lse + far) if far > 0 else (out * 0, sink.expand(6, 3))
    got, got_lse = join_sink_(out.clone(), lse + far, call_with(sink[0]))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got_lse[~alone], want_lse[~alone])


def test_a_call_with_an_earlier_result_has_no_sinks() -> None:
    check_joins(call_with(None), attended())
    check_joins(call_with(torch.zeros(3, dtype=FP64)), None)
    check_joins(call_with(torch.zeros(6, 3), torch.bfloat16), None)
    with pytest.raises(
        ValueError, match=r"sinks join the first .* leave it out of the later calls"
    ):
        check_joins(call_with(torch.zeros(3, dtype=FP64)), attended())


@pytest.mark.parametrize(
    "bad", [torch.zeros(3), torch.zeros(4, dtype=FP64), torch.zeros(5, 3, dtype=FP64),
            torch.zeros(3, dtype=FP64, device="meta"), torch.zeros((), dtype=FP64)],
)  # fmt: skip
def test_wrong_logits_of_a_call(bad: Tensor) -> None:
    with pytest.raises(ValueError, match=r"must be \[H\] or \[T, H\] in torch.float64 on cpu"):
        check_joins(call_with(bad), None)


@pytest.mark.parametrize(
    "sink, text",
    [
        (torch.zeros(2), r"must be \[s, H\] .* with s >= 1, T = 6 and H = 3, got \[2\]"),
        (torch.zeros(()), r"got \[\]"),
        (torch.zeros(1, 4), r"got \[1, 4\]; give one logit per sink and query head"),
        (torch.zeros(0, 3), r"got \[0, 3\]"),
        (torch.zeros(5, 1, 3), r"must be .*\[T, s, H\].* got \[5, 1, 3\]"),
        (torch.zeros(6, 0, 3), r"got \[6, 0, 3\]"),
        (torch.zeros(1, 6, 1, 3), r"got \[1, 6, 1, 3\]"),
        (torch.zeros(1, 3, dtype=torch.int32), "float tensor on cpu, got torch.int32 on cpu"),
        (torch.zeros(1, 3, device="meta"), "float tensor on cpu, got torch.float32 on meta"),
    ],
)
def test_wrong_sinks(sink: Tensor, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        sink_lse_of(sink, Q)


def test_layouts() -> None:
    check_layout("sh")
    check_layout("ssh", torch.zeros(6, 1, 3))
    assert {"sh", "ssh", "shd"} == set(SINK_LAYOUTS)
    with pytest.raises(NotImplementedError, match=r"without values .* got sink_layout 'shd'; add"):
        check_layout("shd")
    for bad in ("hs", "", None, ["sh"]):
        with pytest.raises(ValueError, match=r"'sh' \(\[s, H\]\) or 'ssh' .* got .*; use 'sh' for"):
            check_layout(bad)  # type: ignore[arg-type]
    for layout, sink in (("sh", torch.zeros(6, 1, 3)), ("ssh", torch.zeros(1, 3))):
        with pytest.raises(ValueError, match=f"layout '{layout}' must have . dimensions, got "):
            check_layout(layout, sink)
    with pytest.raises(TypeError, match="sink must be a Tensor"):
        check_layout("sh", [1.0])  # type: ignore[arg-type]
