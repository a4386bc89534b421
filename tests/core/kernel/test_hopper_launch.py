"""What Python asks of the CUDA library, on a stand-in that computes it from the structs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_magi import AttnMask, masks
from megatron_magi.core.cuda.tables import DeviceBuffer
from megatron_magi.core.kernel.backend import AttnCall, GradCall, OutLse
from megatron_magi.core.kernel.hopper import HopperBackend, backward, forward
from megatron_magi.core.kernel.hopper.choice import backward_launch, forward_launch
from megatron_magi.core.kernel.hopper.launch import HeadsKey
from megatron_magi.core.kernel.reference import ReferenceBackend
from megatron_magi.core.kernel.slice_table import SliceTable
from tests.core.kernel import abi_on_cpu
from tests.dense import random_mask

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMED = {
    "causal": masks.causal(200),
    "packed": masks.from_cu_seqlens([0, 1, 70, 200]),
    "window": masks.from_cu_seqlens([0, 150, 300], window_size=(40, 0)),
    "rows that see nothing": masks.from_ranges(
        [[10, 90]], [[0, 50]], [0], total_seqlen_q=120, total_seqlen_k=64
    ),
    "nothing": AttnMask([], 40, 30),
}
SHAPES = [
    (BF16, (64, 64)), (FP16, (128, 128)), (BF16, (192, 128)),
    (BF16, (80, 80)), (FP16, (12, 9)), (BF16, (64, 128)), (FP16, (160, 40)),
]  # fmt: skip
"""Compiled widths, and widths that are padded to those."""
FWD, BWD = "magi_attn_fwd", "magi_attn_bwd"


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[abi_on_cpu.CpuLibrary]:
    made = abi_on_cpu.CpuLibrary()
    names = (f"megatron_magi.core.kernel.hopper.{name}" for name in ("forward", "backward"))
    modules = [importlib.import_module(name) for name in names]
    for module in modules:
        monkeypatch.setattr(module, "cuda_library", lambda: made)
        monkeypatch.setattr(module, "stream_handle", lambda device: 7)
        monkeypatch.setattr(module, "on_device", lambda device: nullcontext())
    sms = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sms)
    monkeypatch.setattr(DeviceBuffer, "use_on", lambda self, handle: None)
    yield made
    abi_on_cpu.BWD_MASKS.clear()


def case(
    mask: AttnMask,
    heads: tuple[int, int] = (4, 2),
    dtype: torch.dtype = BF16,
    widths: tuple[int, int] = (64, 64),
) -> tuple[AttnCall, Tensor]:
    """A call and a gradient of its output; keys and values are parts of one tensor."""
    generator = torch.Generator().manual_seed(mask.total_seqlen_q + widths[0])
    num_q, num_k = mask.total_seqlen_q, mask.total_seqlen_k
    q, dout = (torch.randn(num_q, heads[0], width, generator=generator) for width in widths)
    kv = torch.randn(num_k, heads[1], sum(widths), generator=generator).to(dtype)
    k, v = kv.split(widths, -1)
    table = SliceTable(mask.slices, num_q, num_k)
    return AttnCall(q.to(dtype), k, v, table, 0.11), dout.to(dtype)


def exact(call: AttnCall) -> AttnCall:
    return call._replace(q=call.q.double(), k=call.k.double(), v=call.v.double())


def close(got: OutLse, want: OutLse, dtype: torch.dtype) -> None:
    atol = {BF16: 2e-2, FP16: 3e-3, FP32: 1e-5}[dtype]
    torch.testing.assert_close(got[0].double(), want[0], atol=atol, rtol=atol)
    torch.testing.assert_close(got[1].double(), want[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("dtype, widths", SHAPES, ids=str)
def test_forward(
    name: str, dtype: torch.dtype, widths: tuple[int, int], library: abi_on_cpu.CpuLibrary
) -> None:
    call, _ = case(NAMED[name], dtype=dtype, widths=widths)
    out, lse = forward(call)
    assert out.dtype == dtype and lse.dtype == FP32 and library.calls == [FWD]
    close((out, lse), ReferenceBackend().forward(exact(call)), dtype)
    close(forward(call, out_dtype=FP32), ReferenceBackend().forward(exact(call)), FP32)


@pytest.mark.parametrize("widths", [(64, 64), (80, 48)], ids=str)
@pytest.mark.parametrize("name", NAMED)
def test_largest_logits(name: str, widths: tuple[int, int], library: abi_on_cpu.CpuLibrary) -> None:
    """Raised in place, where they were smaller."""
    call, _ = case(NAMED[name], widths=widths)
    most = torch.tensor([-torch.inf, 1e6, -torch.inf, -1e6])
    want = most.double()
    ReferenceBackend().forward(exact(call)._replace(max_logits=want))
    forward(call._replace(max_logits=most))
    torch.testing.assert_close(most.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_forward_of_random_masks(seed: int, library: abi_on_cpu.CpuLibrary) -> None:
    call, _ = case(random_mask(seed, 90, 70), heads=[(4, 2), (3, 3), (8, 1)][seed % 3])
    close(forward(call), ReferenceBackend().forward(exact(call)), BF16)


@pytest.mark.parametrize("widths", [(64, 64), (192, 128), (80, 48)], ids=str)
def test_a_forward_continues(widths: tuple[int, int], library: abi_on_cpu.CpuLibrary) -> None:
    """Merged into an earlier result in place, rows that see nothing included."""
    call, _ = case(NAMED["rows that see nothing"], widths=widths)
    first, second = call, call._replace(k=call.k.flip(0), v=call.v.flip(0) * 2)
    prev = forward(first, out_dtype=FP32)
    merged = forward(second, prev=prev)
    assert merged[0] is prev[0] and merged[1] is prev[1]
    want = ReferenceBackend().forward(exact(first))
    close(merged, ReferenceBackend().forward(exact(second), prev=want), FP32)


@pytest.mark.parametrize("widths", [(64, 64), (192, 128), (80, 48)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_forward_fills_its_rows_of_a_result(
    dtype: torch.dtype, widths: tuple[int, int], library: abi_on_cpu.CpuLibrary
) -> None:
    call, _ = case(NAMED["rows that see nothing"], widths=widths)
    into = torch.full((*call.q.shape[:2], widths[1]), 7.0, dtype=dtype), torch.full((120, 4), 7.0)
    assert forward(call, into=into) is into
    want = ReferenceBackend().forward(exact(call))
    rows = slice(10, 90)
    close((into[0][rows], into[1][rows]), (want[0][rows], want[1][rows]), dtype)
    for x in into:
        assert (x[:10] == 7).all() and (x[90:] == 7).all()


@pytest.mark.parametrize("how", ["new", "merged", "filled"])
def test_long_walks_in_parts(how: str, library: abi_on_cpu.CpuLibrary) -> None:
    mask = masks.from_ranges([[0, 20]], [[0, 80_000]], [0], total_seqlen_q=24,
                             total_seqlen_k=80_000)  # fmt: skip
    call, _ = case(mask, heads=(2, 1))
    assert forward_launch(call.table, HeadsKey.of(call)).num_parts > 1
    want = ReferenceBackend().forward(exact(call))
    if how == "new":
        close(forward(call), want, BF16)
    elif how == "merged":
        prev = forward(call, out_dtype=FP32)
        close(forward(call, prev=prev), ReferenceBackend().forward(exact(call), prev=want), FP32)
    else:
        into = torch.full(call.q.shape, 7.0), torch.full(call.q.shape[:2], 7.0)
        close(tuple(x[:20] for x in forward(call, into=into)), (want[0][:20], want[1][:20]), FP32)  # type: ignore[arg-type]
        assert (into[0][20:] == 7).all() and (into[1][20:] == 7).all()


@pytest.mark.parametrize("name", ["causal", "packed", "rows that see nothing"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "asked, widths", [(None, (64, 64)), (BF16, (192, 128)), (BF16, (80, 48))], ids=str
)
def test_backward(
    name: str,
    deterministic: bool,
    asked: torch.dtype | None,
    widths: tuple[int, int],
    library: abi_on_cpu.CpuLibrary,
) -> None:
    call, dout = case(NAMED[name], widths=widths)
    abi_on_cpu.BWD_MASKS.append(torch.from_numpy(NAMED[name].to_dense()))
    out, lse = ReferenceBackend().forward(exact(call))
    want = ReferenceBackend().backward(exact(call), GradCall(dout.double(), lse, out=out))
    delta = (out * dout.double()).sum(-1).float()
    grad = GradCall(dout, lse.float(), delta, dtype=asked, deterministic=deterministic)
    for given in (grad, grad._replace(delta=None, out=out.to(BF16)),
                  grad._replace(delta=None, out=out.float())):  # fmt: skip
        for got, x in zip(backward(call, given), want, strict=True):
            assert got.dtype == (asked or FP32) and got.shape == x.shape
            torch.testing.assert_close(got.double(), x, atol=3e-2, rtol=2e-2)
    assert all(key[2] == deterministic for key in call.table.cache if key[0] == "bwd")
    assert library.calls.count(BWD) == 3
    assert library.calls.count("magi_row_delta") == 0, "out in fp32 makes delta in PyTorch"


@pytest.mark.parametrize("widths", [(64, 64), (192, 128), (80, 48)], ids=str)
def test_gradients_go_where_they_are_wanted(
    widths: tuple[int, int], library: abi_on_cpu.CpuLibrary
) -> None:
    """dq is added to what is there; dk and dv lie side by side."""
    call, dout = case(NAMED["causal"], widths=widths)
    abi_on_cpu.BWD_MASKS.append(torch.from_numpy(NAMED["causal"].to_dense()))
    out, lse = ReferenceBackend().forward(exact(call))
    want = ReferenceBackend().backward(exact(call), GradCall(dout.double(), lse, out=out))
    total, pair = torch.ones(call.q.shape), torch.full((200, 2, sum(widths)), 7.0, dtype=BF16)
    dkv = pair.split(widths, -1)
    delta = (out * dout.double()).sum(-1).float()
    grad = GradCall(dout, lse.float(), delta, dtype=BF16, dq=total, dkv=dkv)
    got = backward(call, grad)
    assert got[0] is total and got[1] is dkv[0] and got[2] is dkv[1]
    for found, x in zip((total - 1, *dkv), want, strict=True):
        torch.testing.assert_close(found.double(), x, atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize("widths", [(128, 128), (192, 128)], ids=str)
def test_few_keys_and_many_heads_are_split(
    widths: tuple[int, int], library: abi_on_cpu.CpuLibrary
) -> None:
    call, _ = case(masks.causal(1000), heads=(64, 4), widths=widths)
    launch = backward_launch(call.table, HeadsKey.of(call), False)
    assert launch.params.num_splits > 1
    stats, partial, semaphores, end = launch.scratch_at
    assert partial - stats >= 32 * 64 * 1000 and end == semaphores
    assert semaphores - partial >= 4 * launch.params.num_splits * 1000 * 4 * sum(widths)


def test_nothing_is_launched_for_no_tokens(library: abi_on_cpu.CpuLibrary) -> None:
    call, dout = case(AttnMask([], 0, 8))
    grad = GradCall(dout, torch.zeros(0, 4), torch.zeros(0, 4))
    dq, dk, dv = backward(call, grad)
    assert library.calls == [] and dq.numel() == 0 and not dk.any() and not dv.any()


def test_delta(library: abi_on_cpu.CpuLibrary) -> None:
    call, dout = case(NAMED["causal"])
    got = HopperBackend.delta(call.q, dout, FP32)
    torch.testing.assert_close(got, (call.q.float() * dout.float()).sum(-1))
    assert library.calls == ["magi_row_delta"]
    HopperBackend.delta(call.q.float(), dout, FP32)
    assert library.calls == ["magi_row_delta"], "another dtype: PyTorch"


def test_a_launch_can_be_printed(library: abi_on_cpu.CpuLibrary) -> None:
    call, _ = case(NAMED["causal"])
    key = HeadsKey.of(call)
    assert "head_dim 64" in str(forward_launch(call.table, key))
    assert "deterministic" in str(backward_launch(call.table, key, True))
    assert "deterministic" not in str(backward_launch(call.table, key, False))


def test_a_launch_is_chosen_once(library: abi_on_cpu.CpuLibrary) -> None:
    call, _ = case(NAMED["causal"])
    key = HeadsKey.of(call)
    assert forward_launch(call.table, key) is forward_launch(call.table, HeadsKey.of(call))
    fast, exact_bits = (backward_launch(call.table, key, mode) for mode in (False, True))
    assert fast is backward_launch(call.table, key, False) and fast is not exact_bits
