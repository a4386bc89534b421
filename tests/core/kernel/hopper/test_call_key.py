"""Calls of one form are checked once; calls of another are checked, and launched, as the first."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_magi import masks
from megatron_magi.core.kernel.backend import AttnCall, GradCall
from megatron_magi.core.kernel.call_key import MOST_CALLS, PreparedCalls
from megatron_magi.core.kernel.hopper import backward, forward
from megatron_magi.core.kernel.reference import ReferenceBackend
from megatron_magi.core.kernel.slice_table import SliceTable
from tests.core.kernel import abi_on_cpu
from tests.core.kernel.hopper.launch_cases import BF16, FP16, FP32, case, exact

MASK = masks.from_cu_seqlens([0, 1, 11, 32])


def moved(x: Tensor, elements: int = 0, gap: int = 0) -> Tensor:
    """Equal values ``elements`` behind a multiple of 16 bytes, with a gap between tokens."""
    tokens, heads, width = x.shape
    room = torch.zeros(elements + tokens * (heads * width + gap), dtype=x.dtype)
    made = room[elements:].view(tokens, -1)[:, : heads * width].view(tokens, heads, width)
    assert room.data_ptr() % 16 == 0
    return made.copy_(x)


def continued(call: AttnCall, dtype: torch.dtype = FP32) -> Any:
    return torch.zeros(call.q.shape, dtype=dtype), torch.full(call.q.shape[:2], -torch.inf)


Change = Callable[[AttnCall], tuple[AttnCall, dict[str, Any]]]
CALLS: dict[str, Change] = {
    "the same": lambda c: (c, {}),
    "fp16": lambda c: (c._replace(**{n: getattr(c, n).half() for n in "qkv"}), {}),
    "a scale": lambda c: (c._replace(softmax_scale=0.2), {}),
    "a cap": lambda c: (c._replace(softcap=0.7), {}),
    "rows with gaps": lambda c: (c._replace(q=moved(c.q, 0, 8), v=moved(c.v, 0, 16)), {}),
    "keys with gaps": lambda c: (c._replace(k=moved(c.k, 0, 8)), {}),
    "values with gaps": lambda c: (c._replace(v=moved(c.v, 0, 8)), {}),
    "rows that are copied": lambda c: (c._replace(q=moved(c.q, 0, 1), k=moved(c.k, 0, 3)), {}),
    "another base": lambda c: (c._replace(q=moved(c.q, 8), k=moved(c.k), v=moved(c.v)), {}),
    "a base that is copied": lambda c: (c._replace(q=moved(c.q, 1)), {}),
    "one sink": lambda c: (c._replace(sink_lse=torch.arange(4.0)), {}),
    "a sink a token": lambda c: (c._replace(sink_lse=torch.randn(32, 4)), {}),
    "a sink with gaps": lambda c: (c._replace(sink_lse=torch.randn(4, 32).T), {}),
    "fp32": lambda c: (c, {"out_dtype": FP32}),
    "merged": lambda c: (c, {"prev": continued(c)}),
    "filled": lambda c: (c, {"into": continued(c)}),
    "filled in the dtype of q": lambda c: (c, {"into": continued(c, c.q.dtype)}),
}  # fmt: skip


def every_pair(names: list[str]) -> list[str]:
    """A sequence in which every name follows every name, itself too, once (de Bruijn's)."""
    pairs = [[a, *(x for b in names[i + 1 :] for x in (a, b))] for i, a in enumerate(names)]
    return [x for part in pairs for x in part] + names[:1]


def test_every_name_follows_every_name() -> None:
    made = every_pair(["a", "b", "c"])
    assert len(set(pairwise(made))) == 9 == len(made) - 1


def test_a_forward_does_what_it_does_on_a_table_of_its_own(
    library: abi_on_cpu.CpuLibrary,
) -> None:
    """After one of every other form, and after itself."""
    call, _ = case(MASK)

    def result(name: str, table: SliceTable) -> Any:
        torch.manual_seed(3)
        asked, how = CALLS[name](call._replace(table=table))
        return forward(asked, **how)

    want = {name: result(name, SliceTable(MASK.slices, 32, 32)) for name in CALLS}
    for name in every_pair([*CALLS]):
        for x, y in zip(result(name, call.table), want[name], strict=True):
            assert x.dtype == y.dtype and x.stride() == y.stride() and torch.equal(x, y), name


@pytest.mark.parametrize(
    "change, how, text",
    [
        ({"softmax_scale": float("inf")}, {}, "softmax_scale must be"),
        ({"softmax_scale": float("nan")}, {}, "softmax_scale must be"),
        ({"softcap": 1e9}, {}, "softcap must be"),
        ({"q": torch.zeros(32, 4, 64)}, {}, "take bf16 and fp16"),
        ({"k": torch.zeros(31, 2, 64, dtype=BF16)}, {}, "must have the lengths"),
        ({"q": torch.zeros(31, 4, 64, dtype=BF16)}, {}, "must have the lengths"),
        ({"sink_lse": torch.zeros(3)}, {}, "sink_lse must be"),
        ({}, {"out_dtype": FP16}, "out_dtype must be"),
        ({}, {"prev": (torch.zeros(32, 4, 64, dtype=BF16), torch.zeros(32, 4))}, "to continue"),
        ({}, {"prev": (torch.zeros(32, 4, 64), torch.zeros(32, 3))}, "must be out"),
        ({}, {"into": (torch.zeros(32, 4, 64), torch.zeros(32, 4).half())}, "lse in fp32"),
        ({}, {"into": (torch.zeros(32, 64, 4).mT, torch.zeros(32, 4))}, "last dimension"),
    ],
)
def test_what_a_forward_refuses_it_refuses_also_after_a_good_call(
    change: dict[str, Any], how: dict[str, Any], text: str, library: abi_on_cpu.CpuLibrary
) -> None:
    call, _ = case(MASK)
    forward(call)
    forward(call, into=continued(call))
    forward(call, prev=continued(call))
    launched = len(library.calls)
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=text):
            forward(call._replace(**change), **how)
    assert len(library.calls) == launched


GRADS: dict[str, Callable[[GradCall], dict[str, Any]]] = {
    "the same": lambda g: {},
    "bf16": lambda g: {"dtype": BF16},
    "delta from out": lambda g: {"delta": None, "out": torch.ones_like(g.dout)},
    "delta from out with gaps": lambda g: {"delta": None, "out": moved(g.dout, 0, 8)},
    "delta from out that is copied": lambda g: {"delta": None, "out": moved(g.dout, 1)},
    "delta from out in fp32": lambda g: {"delta": None, "out": torch.ones(g.dout.shape)},
    "dout in fp32": lambda g: {"dout": g.dout.float()},
    "dout with gaps": lambda g: {"dout": moved(g.dout, 0, 8)},
    "dout that is copied": lambda g: {"dout": moved(g.dout, 3)},
    "lse by heads": lambda g: {"lse": g.lse.T.contiguous().T},
    "delta by heads": lambda g: {"delta": torch.zeros(4, 32).T},
    "in a fixed order": lambda g: {"deterministic": True},
    "dq is added to": lambda g: {"dq": torch.ones(g.dout.shape)},
    "dk and dv with gaps": lambda g: {
        "dkv": (moved(torch.ones(32, 2, 64), 0, 4), moved(torch.ones(32, 2, 64), 0, 8))
    },
    "dk and dv elsewhere": lambda g: {"dkv": (torch.ones(32, 2, 64), torch.ones(32, 2, 64))},
}


def test_a_backward_does_what_it_does_on_a_table_of_its_own(
    library: abi_on_cpu.CpuLibrary,
) -> None:
    call, dout = case(MASK)
    abi_on_cpu.BWD_MASKS.append(torch.from_numpy(MASK.to_dense()))
    _, lse = ReferenceBackend().forward(exact(call))
    grad = GradCall(dout, lse.float(), torch.ones(32, 4))

    def result(name: str, table: SliceTable) -> Any:
        return backward(call._replace(table=table), grad._replace(**GRADS[name](grad)))

    want = {name: result(name, SliceTable(MASK.slices, 32, 32)) for name in GRADS}
    for name in every_pair([*GRADS]):
        for x, y in zip(result(name, call.table), want[name], strict=True):
            assert x.dtype == y.dtype and x.stride() == y.stride() and torch.equal(x, y), name


@pytest.mark.parametrize(
    "change, text",
    [
        ({"dtype": FP16}, "gradients must be"),
        ({"delta": None}, "either delta or out"),
        ({"out": torch.zeros(32, 4, 64, dtype=BF16)}, "either delta or out"),
        ({"dout": torch.zeros(32, 4, 32, dtype=BF16)}, "dout must have"),
        ({"dout": torch.zeros(31, 4, 64, dtype=BF16)}, "dout must have"),
        ({"lse": torch.zeros(32, 3)}, "lse must be"),
        ({"lse": torch.zeros(31, 4)}, "lse must be"),
        ({"delta": torch.zeros(32, 4).double()}, "delta must be"),
        ({"dq": torch.zeros(32, 4, 64, dtype=BF16)}, "dq must be written"),
        ({"dq": moved(torch.zeros(32, 4, 64), 1)}, "dq must be written"),
        ({"dkv": (moved(torch.zeros(32, 2, 64), 1), torch.zeros(32, 2, 64))}, "dk must be"),
    ],
)
def test_what_a_backward_refuses_it_refuses_also_after_a_good_call(
    change: dict[str, Any], text: str, library: abi_on_cpu.CpuLibrary
) -> None:
    """Also where the only difference is an address."""
    call, dout = case(MASK)
    abi_on_cpu.BWD_MASKS.append(torch.from_numpy(MASK.to_dense()))
    grad = GradCall(dout, torch.zeros(32, 4), torch.zeros(32, 4))
    pair = torch.zeros(32, 2, 64), torch.zeros(32, 2, 64)
    for good in ({}, {"dq": torch.zeros(32, 4, 64)}, {"dkv": pair}):
        backward(call, grad._replace(**good))  # type: ignore[arg-type]
    launched = len(library.calls)
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=text):
            backward(call, grad._replace(**change))
    assert len(library.calls) == launched


def test_the_numbers_of_a_backward_are_part_of_its_form(library: abi_on_cpu.CpuLibrary) -> None:
    call, dout = case(MASK)
    abi_on_cpu.BWD_MASKS.append(torch.from_numpy(MASK.to_dense()))
    grad = GradCall(dout, torch.full((32, 4), 2.0), torch.zeros(32, 4))
    forms = []
    for change, fixed in (({}, False), ({"softmax_scale": 0.2}, False), ({"softcap": 0.7}, False),
                          ({}, True), ({}, False)):  # fmt: skip
        asked = call._replace(**change)  # type: ignore[arg-type]
        alone = asked._replace(table=SliceTable(MASK.slices, 32, 32))
        given = grad._replace(deterministic=fixed)
        for got, want in zip(backward(asked, given), backward(alone, given), strict=True):
            assert torch.equal(got, want)
        forms.append(len(call.table.calls))
    assert forms == [1, 2, 3, 4, 4]


def test_a_form_is_checked_once(
    library: abi_on_cpu.CpuLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the tensors has the same form."""
    call, _ = case(MASK)
    call = call._replace(k=call.k.contiguous(), v=call.v.contiguous())
    forward(call)
    module = importlib.import_module("megatron_magi.core.kernel.hopper.forward")
    monkeypatch.setattr(module, "_prepare", lambda *_: 1 / 0)
    forward(call._replace(q=call.q.clone(), k=call.k.clone(), v=call.v.clone()))
    with pytest.raises(ZeroDivisionError):
        forward(call._replace(softmax_scale=0.3))


def test_not_every_form_is_kept() -> None:
    forms = PreparedCalls()
    for number in range(3 * MOST_CALLS):
        forms.keep(number, -number)
        assert forms[number] == -number and len(forms) <= MOST_CALLS
