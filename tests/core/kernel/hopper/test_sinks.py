"""What sinks ask of the CUDA library, on a stand-in that computes it from the structs."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from megatron_magi import masks
from megatron_magi.core.kernel import sink_gradient as gradients
from megatron_magi.core.kernel.backend import AttnCall
from megatron_magi.core.kernel.hopper import forward
from megatron_magi.core.kernel.hopper.choice import chosen_forward
from megatron_magi.core.kernel.hopper.launch_values import HeadsKey
from megatron_magi.core.kernel.reference import ReferenceBackend
from megatron_magi.core.kernel.sink_gradient import sink_gradient
from tests.core.kernel import abi_on_cpu
from tests.core.kernel.hopper.launch_cases import BF16, FP32, NAMED, case, close, exact

WIDTHS = [(64, 64), (96, 96), (192, 128), (256, 256), (80, 48)]
KINDS = ["shared", "per token", "strided"]


def sinks_of(call: AttnCall, kind: str) -> Tensor:
    """fp32 [H] or [T, H]; strided: every second number is another's."""
    generator = torch.Generator().manual_seed(3)
    shape = call.q.shape[:2]
    if kind == "strided":
        return torch.randn(shape[0], 2 * shape[1], generator=generator)[:, ::2]
    return torch.randn(shape if kind == "per token" else shape[1:], generator=generator)


def doubled(call: AttnCall) -> AttnCall:
    assert call.sink_lse is not None
    return exact(call)._replace(sink_lse=call.sink_lse.double())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name, widths",
    [("packed", widths) for widths in WIDTHS]
    + [(name, WIDTHS[0]) for name in NAMED if name != "packed"],
    ids=str,
)
def test_forward(
    name: str, widths: tuple[int, int], kind: str, library: abi_on_cpu.CpuLibrary
) -> None:
    call, _ = case(NAMED[name], widths=widths)
    call = call._replace(sink_lse=sinks_of(call, kind), softcap=0.7 if kind == "shared" else 0.0)
    close(forward(call), ReferenceBackend().forward(doubled(call)), BF16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_rows_of_an_earlier_result(
    widths: tuple[int, int], kind: str, library: abi_on_cpu.CpuLibrary
) -> None:
    """Rows that slices cover are written, sinks included; the others stay."""
    call, _ = case(NAMED["rows that see nothing"], widths=widths)
    call = call._replace(sink_lse=sinks_of(call, kind))
    into = torch.full((*call.q.shape[:2], widths[1]), 7.0), torch.full((120, 4), 7.0)
    assert forward(call, into=into) is into
    want = ReferenceBackend().forward(doubled(call))
    rows = slice(10, 90)
    close((into[0][rows], into[1][rows]), (want[0][rows], want[1][rows]), FP32)
    for x in into:
        assert (x[:10] == 7).all() and (x[90:] == 7).all()


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_a_later_call_continues(widths: tuple[int, int], library: abi_on_cpu.CpuLibrary) -> None:
    call, _ = case(NAMED["rows that see nothing"], widths=widths)
    first = call._replace(sink_lse=sinks_of(call, "per token"))
    second = call._replace(k=call.k.flip(0), v=call.v.flip(0) * 2)
    want = ReferenceBackend().forward(doubled(first))
    want = ReferenceBackend().forward(exact(second), prev=want)
    close(forward(second, prev=forward(first, out_dtype=FP32)), want, FP32)
    with pytest.raises(ValueError, match="sinks join the first of several"):
        forward(first, prev=forward(first, out_dtype=FP32))


@pytest.mark.parametrize("kind", KINDS)
def test_long_walks_in_parts_have_them_once(kind: str, library: abi_on_cpu.CpuLibrary) -> None:
    mask = masks.from_ranges([[0, 4]], [[0, 50_000]], [0], total_seqlen_q=6,
                             total_seqlen_k=50_000)  # fmt: skip
    call, _ = case(mask, heads=(2, 1))
    call = call._replace(sink_lse=sinks_of(call, kind) + 10.0)
    assert chosen_forward(call.table, HeadsKey.of(call)).num_parts > 1
    close(forward(call), ReferenceBackend().forward(doubled(call)), BF16)


@pytest.fixture
def sink_library(monkeypatch: pytest.MonkeyPatch) -> abi_on_cpu.CpuLibrary:
    made = abi_on_cpu.CpuLibrary()
    monkeypatch.setattr(gradients, "loaded_cuda_library", lambda device: made)
    monkeypatch.setattr(gradients, "stream_handle", lambda device: 7)
    monkeypatch.setattr(gradients, "on_device", lambda device: nullcontext())
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens, heads", [(1, 1), (7, 3), (200, 4), (3000, 40)])
def test_gradient(tokens: int, heads: int, kind: str, sink_library: abi_on_cpu.CpuLibrary) -> None:
    q = torch.empty(tokens, heads, 1)
    call, _ = case(NAMED["causal"])
    sink = sinks_of(call._replace(q=q), kind)
    generator = torch.Generator().manual_seed(1)
    lse, delta = (torch.randn(heads, tokens, generator=generator).T for _ in range(2))
    got = sink_gradient(sink, lse, delta)
    assert got is not None and got.shape == sink.shape
    assert sink_library.calls == ["magi_sink_gradient"]
    want = sink_gradient(sink.double(), lse.double(), delta.double())
    assert want is not None and sink_library.calls == ["magi_sink_gradient"], "fp64 has no kernel"
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)


def test_a_gradient_without_rows(sink_library: abi_on_cpu.CpuLibrary) -> None:
    got = sink_gradient(torch.ones(4), torch.empty(0, 4), torch.empty(0, 4))
    assert got is not None and got.tolist() == [0.0] * 4 and sink_library.calls == []
