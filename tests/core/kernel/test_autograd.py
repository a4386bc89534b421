"""Ways to call the op: second derivatives, checkpoints, modes, tracing, transforms."""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import megatron_magi as magi
from megatron_magi import flex_flash_attn_func, masks
from megatron_magi.core.kernel import autograd
from megatron_magi.core.kernel.flex_block_mask import block_mask, empty_rows
from megatron_magi.core.kernel.slice_table import SliceTable, slices_tensor
from tests.dense import dense_attention, random_qkv

MASK = masks.from_cu_seqlens([0, 5, 12])
SLICES = slices_tensor(MASK)


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return list(random_qkv(MASK, 4, 2, 8, dtype, 3)[:3])


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_flash_attn_func(q, k, v, slices=SLICES)[0]


def dispatched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.ops.magi.attn_fwd(q, k, v, SLICES, 8**-0.5, q.dtype, "auto", False)[0]


def distributed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return magi.dist_attn(q, k, v, magi.plan(MASK, 1, magi.HeadShape(4, 2, 8)), None)[0]


def moved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dispatch and undispatch alone: linear, so only the gradient itself has a derivative."""
    plan = magi.plan(MASK, 1, magi.HeadShape(4, 2, 8))
    return magi.undispatch(magi.dispatch(q * q, plan, None), plan, None)


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(),
    "square": lambda x: (x * x).sum(),
}


@pytest.mark.parametrize(
    "attention, loss",
    [(a, loss) for a in (eager, dispatched, distributed) for loss in LOSSES] + [(moved, "square")],
)
def test_second_derivatives_are_an_error_and_never_missing(attention: Attention, loss: str) -> None:
    q, k, v = inputs()
    (first,) = torch.autograd.grad(LOSSES[loss](attention(q, k, v)), q, create_graph=True)
    for second in (
        lambda: torch.autograd.grad((first**2).sum() + q.sum(), q, retain_graph=True),
        lambda: (first**2).sum().backward(),
    ):
        with pytest.raises(RuntimeError, match=r"differentiated once.*leave out create_graph"):
            second()


def test_a_first_derivative_in_a_graph_is_right() -> None:
    q, k, v = inputs()
    for a, b in zip(
        torch.autograd.grad(eager(q, k, v).sin().sum(), (q, k, v), create_graph=True),
        torch.autograd.grad(dense_attention(q, k, v, MASK, 8**-0.5)[0].sin().sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "magi":
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_mode_around_one_half_of_a_checkpointed_step(where: str) -> None:
    """The recomputed forward runs the other way; what it saves must fit."""
    q, k, v = inputs()
    want = torch.autograd.grad(eager(q, k, v).square().sum(), (q, k, v))
    watch = Watch()
    with watch if where == "forward" else contextlib.nullcontext():
        loss = checkpoint(eager, q, k, v, use_reentrant=False).square().sum()
    with watch if where == "backward" else contextlib.nullcontext():
        got = torch.autograd.grad(loss, (q, k, v))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    expected = ["attn_fwd.default", "attn_bwd.default"]
    assert watch.names == (expected[:1] if where == "forward" else expected)


@pytest.mark.filterwarnings("ignore")
def test_a_traced_function_records_the_op() -> None:
    q, k, v = (x.detach() for x in inputs(torch.float32))
    eager(q, k, v)  # the table is known
    traced = torch.jit.trace(lambda q, k, v: eager(q, k, v), (q, k, v))
    assert "magi::attn_fwd" in str(traced.graph)
    torch.testing.assert_close(traced(2 * q, k, v), eager(2 * q, k, v))


def test_batched_gradients() -> None:
    q, k, v = inputs()
    out = eager(q, k, v)
    seeds = torch.randn(3, *out.shape, dtype=out.dtype)
    (got,) = torch.autograd.grad(out, q, seeds, is_grads_batched=True, retain_graph=True)
    for row, seed in zip(got, seeds, strict=True):
        torch.testing.assert_close(row, torch.autograd.grad(out, q, seed, retain_graph=True)[0])


def test_batched_gradients_of_lse_alone() -> None:
    q, k, v = inputs()
    lse = flex_flash_attn_func(q, k, v, slices=MASK)[1].lse
    seeds = torch.randn(3, *lse.shape, dtype=lse.dtype)
    (got,) = torch.autograd.grad(lse, q, seeds, is_grads_batched=True, retain_graph=True)
    for row, seed in zip(got, seeds, strict=True):
        torch.testing.assert_close(row, torch.autograd.grad(lse, q, seed, retain_graph=True)[0])


@pytest.mark.parametrize("attention", [eager, distributed])
def test_forward_mode_is_refused(attention: Attention) -> None:
    q, k, v = (x.detach() for x in inputs())
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match=r"no forward-mode derivative.*use reverse mode"),
    ):
        attention(torch.autograd.forward_ad.make_dual(q, torch.ones_like(q)), k, v)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, Watch])
def test_slices_that_were_made_in_inference_mode(mode: Callable[[], Any]) -> None:
    with torch.inference_mode():
        slices = slices_tensor(MASK)
    q, k, v = inputs()
    with mode():
        out, _ = flex_flash_attn_func(q, k, v, slices=slices)
        got = torch.autograd.grad(out.sin().sum(), (q, k, v))
    for a, b in zip(got, torch.autograd.grad(eager(q, k, v).sin().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_flex_fallback_keeps_nothing_that_only_inference_may_use(device: str) -> None:
    """ "meta": another device than the host's, to which the tables are copied."""
    table = SliceTable(MASK.slices[:1], 12, 12)
    with torch.inference_mode():
        empty = empty_rows(table, torch.device(device))
        made = block_mask(table, torch.device(device))
    assert not empty.is_inference()
    assert not made.kv_num_blocks.is_inference() and not made.kv_indices.is_inference()


def test_the_compiler_leaves_a_call_out_and_is_not_loaded_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = []
    monkeypatch.setattr(autograd, "_disable_dynamo", lambda f: lambda *a: ran.append("outside"))
    function = autograd.one_graph_break(lambda: ran.append("as it is"))
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    function()
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # type: ignore[arg-type]
    function()
    assert ran == ["as it is", "outside"]


def shifted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return magi.shift_tokens(q, 1, magi.plan(MASK, 1, magi.HeadShape(4, 2, 8)), None)


def undispatched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return magi.undispatch(q, magi.plan(MASK, 1, magi.HeadShape(4, 2, 8)), None)


def vjp(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
    return lambda x: torch.func.vjp(function, x)


@pytest.mark.parametrize("attention", [eager, distributed, moved, undispatched, shifted])
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, vjp])
def test_gradients_by_transforms_are_refused(attention: Attention, transform: Any) -> None:
    """PyTorch's own error speaks of a method that users do not write."""
    q, k, v = (x.detach() for x in inputs())
    with pytest.raises(NotImplementedError, match=r"torch\.func.*use backward\(\) or torch.autogr"):
        transform(lambda q: attention(q, k, v).sum())(q)


def batched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.vmap(lambda q: eager(q, k, v))(q[None])


def test_gradients_of_batches_are_refused_too() -> None:
    q, k, v = (x.detach() for x in inputs())
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda q: batched(q, k, v).sum())(q)


@pytest.mark.parametrize("attention", [distributed, moved, undispatched, shifted])
def test_moves_inside_of_vmap_are_refused(attention: Attention) -> None:
    q, k, v = (x.detach() for x in inputs())
    with pytest.raises(NotImplementedError, match=r"inside of a transform of torch\.func"):
        torch.vmap(lambda q: attention(q, k, v))(q[None])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_that_ask_for_no_gradient_of_attention_pass() -> None:
    q, k, v = inputs()
    batch = torch.stack([q, 2 * q])
    got = torch.vmap(lambda q: eager(q, k, v))(batch)
    for out, x in zip(got, batch, strict=True):
        assert torch.equal(out, eager(x, k, v))
    wanted = torch.autograd.grad(eager(2 * q, k, v).sum(), (q, k, v))
    for a, b in zip(torch.autograd.grad(got[1].sum(), (q, k, v)), wanted, strict=True):
        torch.testing.assert_close(a, b)
    factor = torch.func.grad(lambda x: (x * eager(q, k, v)).sum())(torch.ones((), dtype=q.dtype))
    wanted = eager(q, k, v).sum()
    torch.testing.assert_close(factor, wanted)
    torch.testing.assert_close(torch.autograd.grad(factor, k), torch.autograd.grad(wanted, k))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def test_a_direct_apply_is_that_of_the_function_also_in_transforms() -> None:
    """Which refuse functions such as ours instead of leaving them out."""
    double = autograd.apply_without_functorch(Doubled)
    x = torch.ones(3, requires_grad=True)
    (grad,) = torch.autograd.grad(double(x).sum(), x)
    assert grad.tolist() == [2, 2, 2]
    for apply in (double, Doubled.apply):
        with pytest.raises(RuntimeError, match="setup_context"):
            torch.func.grad(lambda x, apply=apply: apply(x).sum())(torch.ones(3))
