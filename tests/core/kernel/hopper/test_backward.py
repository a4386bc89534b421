"""What a backward asks of the CUDA library, on a stand-in that computes it from the structs."""

from __future__ import annotations

import pytest
import torch

from megatron_magi import AttnMask
from megatron_magi.core.kernel.backend import GradCall
from megatron_magi.core.kernel.hopper import HopperBackend, backward
from megatron_magi.core.kernel.reference import ReferenceBackend
from tests.core.kernel import abi_on_cpu
from tests.core.kernel.hopper.launch_cases import BF16, FP32, NAMED, case, exact


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "name, asked, widths",
    [
        ("causal", None, (64, 64)),
        ("rows that see nothing", None, (64, 64)),
        ("packed", BF16, (96, 96)),
        ("packed", None, (80, 80)),
        ("packed", BF16, (192, 128)),
        ("packed", BF16, (80, 48)),
        ("packed", BF16, (256, 256)),
        ("packed", None, (160, 200)),
    ],
    ids=str,
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
    assert library.calls.count("magi_attn_bwd") == 3
    assert library.calls.count("magi_row_delta") == 0, "out in fp32 makes delta in PyTorch"


@pytest.mark.parametrize("widths", [(64, 64), (96, 96), (256, 256), (80, 48)], ids=str)
def test_capped_logits(widths: tuple[int, int], library: abi_on_cpu.CpuLibrary) -> None:
    call, dout = case(NAMED["packed"], widths=widths)
    call = call._replace(softcap=0.7)
    abi_on_cpu.BWD_MASKS.append(torch.from_numpy(NAMED["packed"].to_dense()))
    out, lse = ReferenceBackend().forward(exact(call))
    want = ReferenceBackend().backward(exact(call), GradCall(dout.double(), lse, out=out))
    delta = (out * dout.double()).sum(-1).float()
    for got, x in zip(backward(call, GradCall(dout, lse.float(), delta)), want, strict=True):
        torch.testing.assert_close(got.double(), x, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "widths", [(64, 64), (96, 96), (192, 128), (256, 256), (80, 48), (192, 192)], ids=str
)
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
