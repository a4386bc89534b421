"""Calls of ``flex_flash_attn_func`` that are recognised compute what the first ones do."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_magi import AttnMask, flex_flash_attn_func
from megatron_magi.core.kernel import call_key, op
from megatron_magi.core.kernel.backend import AttnCall
from megatron_magi.core.kernel.hopper import HopperBackend, launch_values
from tests.core.kernel import abi_on_cpu
from tests.core.kernel.hopper.launch_cases import BF16, NAMED
from tests.core.kernel.hopper.test_call_key import moved

MASK = NAMED["packed"]
TOKENS = MASK.total_seqlen_q


class Counted(HopperBackend):
    """Counts the calls that are prepared, and those of its stand-in library."""

    def __init__(self, library: abi_on_cpu.CpuLibrary) -> None:
        self.library, self.prepared = library, 0

    def prepared_forward(self, call: AttnCall, out_dtype: torch.dtype) -> Any:  # type: ignore[override]
        self.prepared += 1
        return HopperBackend.prepared_forward(call, out_dtype)


@pytest.fixture
def kernel(library: abi_on_cpu.CpuLibrary, monkeypatch: pytest.MonkeyPatch) -> Counted:
    made = Counted(library)
    monkeypatch.setattr(op, "select_backend", lambda *_: made)
    abi_on_cpu.BWD_MASKS.append(torch.from_numpy(MASK.to_dense()))
    return made


def mask() -> AttnMask:
    """One with which nothing was computed."""
    return AttnMask(MASK.slices.copy(), TOKENS, TOKENS)


def inputs(seed: int) -> list[Tensor]:
    gen = torch.Generator().manual_seed(seed)
    made = [torch.randn(TOKENS, h, 64, generator=gen).to(BF16) for h in (4, 2, 2)]
    return [x.requires_grad_() for x in made]


def run(qkv: list[Tensor], slices: AttnMask, dout: Tensor, **how: Any) -> tuple[Tensor, ...]:
    out, meta = flex_flash_attn_func(*qkv, slices=slices, **how)
    most = () if meta.max_logits is None else (meta.max_logits,)
    return (out, meta.lse, *most, *torch.autograd.grad(out, qkv, dout))


def dout(seed: int = 9) -> Tensor:
    return torch.randn(TOKENS, 4, 64, generator=torch.Generator().manual_seed(seed)).to(BF16)


def assert_as_first(
    calls: list[Callable[[AttnMask], tuple[Tensor, ...]]], slices: AttnMask
) -> None:
    """Every call gives with these slices what it gives with slices of its own."""
    for call in calls:
        for got, want in zip(call(slices), call(mask()), strict=True):
            assert torch.equal(got, want)


def test_a_second_call_is_recognised(kernel: Counted) -> None:
    slices = mask()
    for seed in range(5):
        run(inputs(seed), slices, dout(seed))
    assert kernel.prepared == 1
    assert kernel.library.calls == ["magi_attn_fwd", "magi_attn_bwd"] * 5
    calls = [lambda m, s=s: run(inputs(s), m, dout(s)) for s in range(5)]
    assert_as_first(calls, slices)


@pytest.mark.parametrize("how", [{"return_max_logits": True}, {"softcap": 2.0}], ids=str)
def test_what_is_asked_besides_is_part_of_it(how: dict[str, Any], kernel: Counted) -> None:
    """A plain call and one that asks for more, in turn."""
    slices = mask()
    calls = [lambda m, h=h, s=s: run(inputs(s), m, dout(), **h)
             for s in range(4) for h in ({}, how)]  # fmt: skip
    assert_as_first(calls, slices)


def test_tensors_that_no_kernel_can_read_are_copied(kernel: Counted) -> None:
    """Other bases do not change a form."""
    slices = mask()
    bases = [0, 0, 0, 1, 0, 3]

    def call(m: AttnMask, base: int) -> tuple[Tensor, ...]:
        q, k, v = inputs(base)
        qkv = [moved(x.detach(), base).requires_grad_() for x in (q, k, v)]
        return run(qkv, m, moved(dout(), base))

    assert_as_first([lambda m, b=b: call(m, b) for b in bases], slices)


@pytest.mark.parametrize("which", range(5))
def test_each_tensor_may_lie_elsewhere(which: int, kernel: Counted) -> None:
    """q, k, v, and of a backward dout and out, after calls that are recognised."""
    slices = mask()

    def call(m: AttnMask, base: int) -> tuple[Tensor, ...]:
        bases = [base if i == which else 0 for i in range(5)]
        qkv = [
            moved(x.detach(), b).requires_grad_() for x, b in zip(inputs(2), bases, strict=False)
        ]

        def unpacked(x: Tensor) -> Tensor:
            return moved(x, base) if x.ndim == 3 and which == 4 and x.shape[1] == 4 else x

        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpacked):
            return run(qkv, m, moved(dout(), bases[3]))

    assert_as_first([lambda m, b=b: call(m, b) for b in (0, 0, 0, 3, 0, 1)], slices)


def test_gradients_of_other_strides_are_computed(kernel: Counted) -> None:
    slices = mask()
    wide = torch.randn(4, TOKENS, 64, generator=torch.Generator().manual_seed(3)).to(BF16)
    given = [dout(), dout(1), dout(2), wide.transpose(0, 1), dout(), wide[:1].transpose(0, 1).
             expand(-1, 4, -1), dout()]  # fmt: skip
    assert_as_first([lambda m, d=d: run(inputs(1), m, d) for d in given], slices)


def test_a_copied_tensor_is_recognised_and_logged_once(
    kernel: Counted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A misaligned query, and the expanded gradient of out.sum()."""
    slices = mask()

    def call() -> tuple[Tensor, ...]:
        q, k, v = inputs(2)
        one = torch.ones((), dtype=BF16).expand(TOKENS, 4, 64)
        return run([moved(q.detach(), 1).requires_grad_(), k, v], slices, one)

    launch_values._say_copied.cache_clear()
    wanted = call()
    for name in ("forward", "backward"):
        module = importlib.import_module(f"megatron_magi.core.kernel.hopper.{name}")
        monkeypatch.setattr(module, "_prepare", None)
    for _ in range(2):
        assert all(map(torch.equal, call(), wanted))
    assert [record.message for record in caplog.records if "copies" in record.message] == [
        "attention copies tensors that the kernels cannot read in place, in this call and in later "
        "ones: rows must begin at multiples of 16 bytes, and none may be expanded, as a gradient "
        "of out.sum() is"
    ]


def test_hooks_may_return_tensors_of_other_strides(kernel: Counted) -> None:
    """As one that keeps saved tensors elsewhere may do."""
    slices = mask()
    gaps = [0, 0, 0, 8, 1, 0]

    def call(m: AttnMask, gap: int) -> tuple[Tensor, ...]:
        def unpacked(x: Tensor) -> Tensor:
            return moved(x, 0, gap) if x.ndim == 3 else x

        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), unpacked):
            return run(inputs(2), m, dout())

    assert_as_first([lambda m, g=g: call(m, g) for g in gaps], slices)


def test_without_gradients_too(kernel: Counted) -> None:
    slices = mask()
    with torch.no_grad():
        outs = [flex_flash_attn_func(*inputs(s), slices=slices)[0] for s in range(4)]
        wanted = [flex_flash_attn_func(*inputs(s), slices=mask())[0] for s in range(4)]
    assert all(map(torch.equal, outs, wanted))
    assert kernel.prepared == 1 + 4


def test_sinks_are_not_kept(kernel: Counted) -> None:
    """What one call has of them is not kept for another."""
    slices = mask()

    def call(m: AttnMask, sink: float) -> tuple[Tensor, ...]:
        return run(inputs(0), m, dout(), sink=torch.full((1, 4), sink))

    plain = [lambda m: run(inputs(0), m, dout())] * 3
    assert_as_first([*plain, *(lambda m, s=s: call(m, s) for s in (0.0, 1.0, 4.0)), *plain], slices)


def test_a_gradient_of_lse_may_come_between(kernel: Counted) -> None:
    """Delta is given then, and out is not."""
    slices = mask()

    def of_lse(m: AttnMask) -> tuple[Tensor, ...]:
        qkv = inputs(1)
        out, meta = flex_flash_attn_func(*qkv, slices=m)
        loss = (out.float() * dout()).sum() + meta.lse.sum()
        return (out, meta.lse, *torch.autograd.grad(loss, qkv))

    def of_out(m: AttnMask) -> tuple[Tensor, ...]:
        return run(inputs(0), m, dout())

    assert_as_first([of_out, of_out, of_out, of_lse, of_out, of_lse], slices)


def test_threads_share_what_is_kept(kernel: Counted) -> None:
    """Forms are dropped meanwhile, and each thread has other inputs."""
    slices = mask()

    def call(m: AttnMask, number: int) -> tuple[Tensor, ...]:
        gap = 8 * (number % 3)
        qkv = [moved(x.detach(), 0, gap).requires_grad_() for x in inputs(number)]
        return run(qkv, m, dout(number), return_max_logits=number % 2 == 0)

    wanted = [call(mask(), number) for number in range(8)]
    numbers = [number for _ in range(6) for number in range(8)]
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads, mock.patch.object(call_key, "MOST_CALLS", 2):
            made = list(threads.map(lambda number: call(slices, number), numbers))
    finally:
        sys.setswitchinterval(usual)
    for number, got in zip(numbers, made, strict=True):
        assert all(map(torch.equal, got, wanted[number]))
