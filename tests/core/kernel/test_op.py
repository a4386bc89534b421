"""The ops of torch.library and the eager calls beside them ask the backend for the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_magi import flex_flash_attn_func, masks
from megatron_magi.core.kernel import op
from megatron_magi.core.kernel.backend import AttnCall, GradCall, OutLse
from megatron_magi.core.kernel.op import AttnOptions, AttnRequest, attend
from megatron_magi.core.kernel.reference import ReferenceBackend
from megatron_magi.core.kernel.slice_table import slices_tensor
from tests.dense import random_qkv

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
MASK = masks.from_cu_seqlens([0, 5, 12])
SLICES = slices_tensor(MASK)
OPTIONS = AttnOptions(0.3, FP64, "auto", False)
WIDTHS = [8, (8, 6)]
"""head_dim of q and k, and of v where it has another."""


def inputs(dtype: torch.dtype = FP64, width: int | tuple[int, int] = 8) -> list[Tensor]:
    return list(random_qkv(MASK, 4, 2, width, dtype, 3)[:3])


class Seen(TorchDispatchMode):
    """A mode that changes nothing: below it every call is an op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def as_op(q: Tensor, k: Tensor, v: Tensor, options: AttnOptions = OPTIONS) -> OutLse:
    return torch.ops.magi.attn_fwd(q, k, v, SLICES, *options)


def eager(q: Tensor, k: Tensor, v: Tensor, options: AttnOptions = OPTIONS) -> OutLse:
    return attend(q, k, v, AttnRequest(SLICES, options))


def below_a_mode(q: Tensor, k: Tensor, v: Tensor, options: AttnOptions = OPTIONS) -> OutLse:
    with Seen():
        return attend(q, k, v, AttnRequest(SLICES, options))


Attention = Callable[..., OutLse]
WAYS = [eager, as_op, below_a_mode]


class Recorder(ReferenceBackend):
    """Keeps what it is asked, and by which names it was chosen."""

    def __init__(self) -> None:
        self.chosen: list[tuple[Any, ...]] = []
        self.calls: list[tuple[AttnCall, Any]] = []
        self.grads: list[tuple[AttnCall, GradCall]] = []

    def choose(self, *how: Any) -> Recorder:
        self.chosen.append(how)
        return self

    def forward(self, call: AttnCall, **how: Any) -> OutLse:
        self.calls.append((call, how))
        return super().forward(call, **how)

    def backward(self, call: AttnCall, grad: GradCall) -> tuple[Tensor, Tensor, Tensor]:
        self.grads.append((call, grad))
        return super().backward(call, grad)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(op, "select_backend", made.choose)
    return made


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("width", WIDTHS, ids=str)
def test_a_forward_asks_for_what_it_is_given(
    way: Attention, width: int | tuple[int, int], backend: Recorder
) -> None:
    q, k, v = (x.detach() for x in inputs(BF16, width))
    out, lse = way(q, k, v, AttnOptions(0.7, FP32, "reference", True, 3.0))
    assert (out.dtype, lse.dtype, lse.shape) == (FP32, FP32, (12, 4))
    assert backend.chosen == [("reference", q.device, BF16, (q.shape[2], v.shape[2]))]
    ((call, how),) = backend.calls
    assert how == {"out_dtype": FP32} and (call.softmax_scale, call.softcap) == (0.7, 3.0)
    assert all(map(torch.equal, call[:3], (q, k, v)))
    assert (call.table.slices == MASK.slices).all()
    assert (call.table.num_q, call.table.num_k) == (12, 12)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_backward_asks_for_the_same(
    way: Attention, deterministic: bool, backend: Recorder
) -> None:
    """In the dtype of q, with the scale, the softcap and the backend of its forward."""
    q, k, v = inputs(BF16)
    out, _ = way(q, k, v, AttnOptions(0.7, FP32, "flex", deterministic, 3.0))
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert {x.dtype for x in (dq, dk, dv)} == {BF16}
    assert backend.chosen == [("flex", q.device, BF16, (8, 8))] * (1 if way is eager else 2)
    ((call, grad),) = backend.grads
    assert (call.softmax_scale, call.softcap) == (0.7, 3.0)
    assert (call.table.slices == MASK.slices).all()
    assert grad.dtype == BF16 and grad.deterministic is deterministic


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reaches", ["out", "lse", "both"])
def test_delta_is_the_row_sum_less_the_gradient_of_lse(
    way: Attention, reaches: str, backend: Recorder
) -> None:
    q, k, v = inputs()
    out, lse = way(q, k, v)
    dout = torch.randn_like(out) if reaches != "lse" else torch.zeros_like(out)
    dlse = torch.randn_like(lse) if reaches != "out" else torch.zeros_like(lse)
    made = [x for x, name in ((out, "out"), (lse, "lse")) if reaches in (name, "both")]
    torch.autograd.grad(made, (q, k, v), [dout if x is out else dlse for x in made])
    ((_, grad),) = backend.grads
    want = (out * dout).sum(-1) - dlse
    torch.testing.assert_close(grad.dout, dout)
    torch.testing.assert_close(grad.lse, lse)
    if way is eager and reaches == "out":  # the kernel makes delta itself, in its own launch
        assert grad.delta is None and grad.out is not None
        assert torch.equal(grad.out, out)
    else:
        assert grad.out is None and grad.delta is not None
        torch.testing.assert_close(grad.delta, want.detach())


@pytest.mark.parametrize("reaches", ["out", "lse", "both"])
@pytest.mark.parametrize("width", WIDTHS, ids=str)
def test_gradients_are_the_same_either_way(reaches: str, width: int | tuple[int, int]) -> None:
    def grads(way: Attention) -> tuple[Tensor, ...]:
        q, k, v = inputs(width=width)
        out, lse = way(q, k, v)
        parts = {"out": out.sin().sum(), "lse": lse.cos().sum()}
        loss = sum(parts.values()) if reaches == "both" else parts[reaches]
        return out, lse, *torch.autograd.grad(loss, (q, k, v))

    direct = grads(eager)
    for way in (as_op, below_a_mode):
        for a, b in zip(direct, grads(way), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_either_way_saves_the_same_tensors_in_one_order() -> None:
    """A checkpoint may run one in the forward and the other when it recomputes."""

    def saved(way: Attention) -> list[Tensor]:
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            way(*inputs())
        return kept

    direct, dispatched = saved(eager), saved(as_op)
    assert len(direct) == 6
    assert all(map(torch.equal, direct, dispatched)) and len(dispatched) == 6


@pytest.mark.parametrize("needed", ["q", "k", "v", "none"])
def test_one_input_with_a_gradient_is_enough(needed: str) -> None:
    given = {name: x.detach() for name, x in zip("qkv", inputs(), strict=True)}
    if needed != "none":
        given[needed].requires_grad_()
    out, lse = eager(**given)
    assert out.requires_grad == lse.requires_grad == (needed != "none")
    with torch.no_grad():
        assert not eager(**given)[0].requires_grad


def test_a_call_without_gradients_is_the_kernel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of autograd takes longer on the host than the launch."""
    monkeypatch.setattr(op, "_apply", None)
    with torch.no_grad():
        eager(*inputs())
    eager(*(x.detach() for x in inputs()))


@pytest.mark.parametrize("shape", [(4,), (12, 4)], ids=str)
def test_sinks_pass_either_way(shape: tuple[int, ...], backend: Recorder) -> None:
    """To the forward alone; their gradient needs delta, so the backward is given it."""
    logit = torch.linspace(-1, 2, torch.Size(shape).numel(), dtype=FP64).view(shape)
    results = []
    for way in WAYS:
        leaves = [*inputs(), logit.clone().requires_grad_()]
        out, lse = way(*leaves[:3], OPTIONS._replace(sink_lse=leaves[3]))
        results.append((out, lse, *torch.autograd.grad([out.sin().sum(), lse.sum()], leaves)))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-13, atol=1e-13)
    assert all(torch.equal(call.sink_lse, logit) for call, _ in backend.calls)
    assert all(call.sink_lse is None and grad.out is None for call, grad in backend.grads)
    torch.library.opcheck(
        torch.ops.magi.attn_fwd.default,
        (*inputs(), SLICES, *OPTIONS._replace(sink_lse=logit.requires_grad_())),
    )


@pytest.mark.parametrize("width", WIDTHS, ids=str)
def test_the_ops_keep_the_rules_of_torch_library(width: int | tuple[int, int]) -> None:
    """Schema, fake tensors, autograd and dynamic shapes."""
    q, k, v = inputs(width=width)
    torch.library.opcheck(torch.ops.magi.attn_fwd.default, (q, k, v, SLICES, *OPTIONS))
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = as_op(q, k, v)
    given = (out, q, k, v, lse, torch.zeros_like(lse), SLICES, 0.3, "auto", False)
    torch.library.opcheck(torch.ops.magi.attn_bwd.default, given)


@pytest.mark.parametrize("dtype, acc", [(BF16, FP32), (FP32, FP32), (FP64, FP64)])
def test_tensors_without_memory_have_shapes_and_dtypes(
    dtype: torch.dtype, acc: torch.dtype
) -> None:
    q, k, v = (x.to("meta", dtype).requires_grad_() for x in inputs(width=(8, 6)))
    out, lse = eager(q, k, v, OPTIONS._replace(out_dtype=torch.float16))
    assert (out.shape, out.dtype, out.device.type) == ((12, 4, 6), torch.float16, "meta")
    assert (lse.shape, lse.dtype) == ((12, 4), acc)
    for x, grad in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert (grad.shape, grad.dtype) == (x.shape, dtype)


def test_torch_compile_sees_one_graph() -> None:
    q, k, v = inputs(FP32)

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_flash_attn_func(q * 2, k, v, slices=SLICES, softcap=0.7)[0] + 1

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    got, want = compiled(q, k, v), step(q, k, v)
    torch.testing.assert_close(got, want)
    for a, b in zip(
        torch.autograd.grad(got.sum(), (q, k, v)),
        torch.autograd.grad(want.sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_a_tensor_may_outlive_its_transform(backend: Recorder) -> None:
    """It is a wrapper then, without memory of its own, which a kernel could not read."""
    kept: list[Tensor] = []
    q, k, v = (x.detach() for x in inputs())
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(q)
    with pytest.raises(RuntimeError):
        kept[0].data_ptr()
    for needs in (False, True):
        k.requires_grad_(needs)
        for got, want in zip(eager(kept[0], k, v), eager(q, k, v), strict=True):
            assert torch.equal(got, want)
    assert [call.q.data_ptr() for call, _ in backend.calls] == [q.data_ptr()] * 4
