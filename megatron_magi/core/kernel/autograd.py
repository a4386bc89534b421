"""How magi's calls behave under tracing and differentiation, and what they refuse."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad


def needs_dispatcher(*tensors: Tensor) -> bool:
    """True if something must see ``torch.ops.magi``: torch.compile, tracing, a dispatch mode (fake
    tensors, selective checkpointing, flop counters), a transform, a tensor subclass or a tensor
    without memory."""
    if torch.compiler.is_compiling():
        return True
    for x in tensors:
        if type(x) is not Tensor or x.is_meta or _is_batched(x):
            return True
    return _tracing_state() is not None or _num_dispatch_modes() > 0 or _transform() is not None


# Bound once: every attention call asks them twice.
_tracing_state = torch._C._get_tracing_state
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack
_is_batched = torch._C._functorch.is_legacy_batchedtensor


def apply_without_functorch(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` for calls outside of transforms (``torch.func``), without the several
    microseconds in which it looks for them and for tensors that have outlived one; see
    ``unwrap_dead_functorch``."""
    direct = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def apply(*args: Any) -> Any:
        if _transform() is not None:
            return function.apply(*args)
        return direct(*args)

    return apply


unwrap_dead_functorch: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead
"""The tensor itself, or the one inside, if it is the wrapper of a transform that has ended."""


def refuse_tangents(*tensors: Tensor) -> None:
    """Refuse forward-mode differentiation, which would silently get no derivative.

    Raises:
        NotImplementedError: inputs with tangents.
    """
    if forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "attention has no forward-mode derivative (jvp), got inputs with tangents; use "
            "reverse mode (backward, vjp)"
        )


def refuse_transforms() -> None:
    """Refuse the transforms of torch.func on behalf of distributed attention and the moves of its
    tokens: an autograd function that exchanges rows has no rule for them.

    Raises:
        NotImplementedError: the call is inside of one.
    """
    if _transform() is not None:
        raise NotImplementedError(
            "distributed attention and the moves of its tokens must not be called inside of a "
            f"transform of torch.func (grad, vjp, jacrev, vmap), got such a call; {_REMEDY}"
        )


def refuse_gradients_of_transforms(*tensors: Tensor) -> None:
    """Refuse gradients of torch.func, whose rules PyTorch's own registration of an op lacks.

    Raises:
        NotImplementedError: inside of a transform, a gradient of the inputs is asked for.
    """
    if torch.compiler.is_compiling() or _transform() is None or not torch.is_grad_enabled():
        return
    if any(map(_is_differentiated, tensors)):
        raise NotImplementedError(
            "attention must not be differentiated by a transform of torch.func (grad, vjp, "
            f"jacrev), got inputs whose gradient one asks for; {_REMEDY}"
        )


def _is_differentiated(x: Tensor) -> bool:
    """True if one of the wrappers around a tensor is that of a transform that asks for its
    gradient. Inside all wrappers backward() may ask for it."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_gradtrackingtensor(x) and x.requires_grad:
            return True
        x = functorch.get_unwrapped(x)
    return False


_REMEDY = "use backward() or torch.autograd.grad, and put batches into the tokens"

P = ParamSpec("P")
R = TypeVar("R")


def one_graph_break(function: Callable[P, R]) -> Callable[P, R]:
    """Keep a function out of torch.compile's graphs: one graph ends before it, the next begins
    after it.

    Plans are numpy and C++ on the host, ranks compare them through gloo, and rows are exchanged by
    asynchronous collectives with host-side tables: a graph has no operators for these. With
    ``fullgraph=True`` torch reports the break as an error. ``torch.compiler.disable`` does the
    same, but imports the compiler (1.7 s) even if nothing is compiled.
    """
    outside: Callable[P, R] = _disable_dynamo(function)

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" in sys.modules:
            return outside(*args, **kwargs)
        return function(*args, **kwargs)

    return run


Backward = Callable[..., tuple[Tensor | None, ...]]


def differentiable_once(backward: Backward) -> Backward:
    """Wrap an autograd function's backward so that differentiating it raises an error.

    ``torch.autograd.function.once_differentiable`` is not enough: it attaches its error to new
    leaves, so a derivative with respect to given inputs (``torch.autograd.grad``) does not meet it.
    Here the error stands between the gradients and all tensors that they depend on.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            results = backward(ctx, *grads)
        needed = (*ctx.saved_tensors, *grads)
        made = iter(_Once.apply(len(needed), *needed, *(x for x in results if x is not None)))
        return tuple(None if x is None else next(made) for x in results)

    return run


def refuse_second_derivative(*_: Any) -> NoReturn:
    raise RuntimeError(
        "attention and the moves of its tokens can be differentiated once, got a second derivative "
        "through them; leave out create_graph=True, or use PyTorch's own attention"
    )


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, num_inputs: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[num_inputs:] if x is not None)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
