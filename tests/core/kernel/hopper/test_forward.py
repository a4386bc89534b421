"""What a forward asks of the CUDA library, on a stand-in that computes it from the structs."""

from __future__ import annotations

import pytest
import torch

from megatron_magi import masks
from megatron_magi.core.kernel.hopper import forward
from megatron_magi.core.kernel.hopper.choice import chosen_forward
from megatron_magi.core.kernel.hopper.launch_values import HeadsKey
from megatron_magi.core.kernel.reference import ReferenceBackend
from tests.core.kernel import abi_on_cpu
from tests.core.kernel.hopper.launch_cases import BF16, FP16, FP32, NAMED, case, close, exact
from tests.dense import random_mask

SHAPES = [
    (BF16, (64, 64)), (FP16, (128, 128)), (BF16, (192, 128)), (BF16, (256, 256)),
    (BF16, (96, 96)), (FP16, (96, 96)), (BF16, (80, 80)), (FP16, (12, 9)), (BF16, (64, 128)),
    (FP16, (160, 40)), (FP16, (96, 200)),
]  # fmt: skip
"""Compiled widths, and widths that are padded to those."""


@pytest.mark.parametrize(
    "name, dtype, widths",
    [("packed", *shape) for shape in SHAPES]
    + [(name, *SHAPES[0]) for name in NAMED if name != "packed"],
    ids=str,
)
def test_forward(
    name: str, dtype: torch.dtype, widths: tuple[int, int], library: abi_on_cpu.CpuLibrary
) -> None:
    call, _ = case(NAMED[name], dtype=dtype, widths=widths)
    out, lse = forward(call)
    assert out.dtype == dtype and lse.dtype == FP32 and library.calls == ["magi_attn_fwd"]
    close((out, lse), ReferenceBackend().forward(exact(call)), dtype)
    close(forward(call, out_dtype=FP32), ReferenceBackend().forward(exact(call)), FP32)


@pytest.mark.parametrize("widths", [(64, 64), (96, 96), (80, 48)], ids=str)
def test_capped_logits(widths: tuple[int, int], library: abi_on_cpu.CpuLibrary) -> None:
    """And the largest of them."""
    call, _ = case(NAMED["packed"], widths=widths)
    call, most = call._replace(softcap=0.7), torch.full((4,), -torch.inf)
    want = most.double()
    plain = ReferenceBackend().forward(exact(call)._replace(max_logits=want))
    close(forward(call._replace(max_logits=most)), plain, BF16)
    torch.testing.assert_close(most.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("widths", [(64, 64), (96, 96), (80, 48)], ids=str)
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


@pytest.mark.parametrize(
    "widths", [(64, 64), (96, 96), (192, 128), (256, 256), (80, 48), (192, 192)], ids=str
)
def test_a_forward_continues(widths: tuple[int, int], library: abi_on_cpu.CpuLibrary) -> None:
    """Merged into an earlier result in place, rows that see nothing included."""
    call, _ = case(NAMED["rows that see nothing"], widths=widths)
    first, second = call, call._replace(k=call.k.flip(0), v=call.v.flip(0) * 2)
    prev = forward(first, out_dtype=FP32)
    merged = forward(second, prev=prev)
    assert merged[0] is prev[0] and merged[1] is prev[1]
    want = ReferenceBackend().forward(exact(first))
    close(merged, ReferenceBackend().forward(exact(second), prev=want), FP32)


@pytest.mark.parametrize(
    "widths", [(64, 64), (96, 96), (192, 128), (256, 256), (80, 48), (192, 192)], ids=str
)
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
    mask = masks.from_ranges([[0, 4]], [[0, 50_000]], [0], total_seqlen_q=6,
                             total_seqlen_k=50_000)  # fmt: skip
    call, _ = case(mask, heads=(2, 1))
    assert chosen_forward(call.table, HeadsKey.of(call)).num_parts > 1
    want = ReferenceBackend().forward(exact(call))
    if how == "new":
        close(forward(call), want, BF16)
    elif how == "merged":
        prev = forward(call, out_dtype=FP32)
        close(forward(call, prev=prev), ReferenceBackend().forward(exact(call), prev=want), FP32)
    else:
        into = torch.full(call.q.shape, 7.0), torch.full(call.q.shape[:2], 7.0)
        close(tuple(x[:4] for x in forward(call, into=into)), (want[0][:4], want[1][:4]), FP32)  # type: ignore[arg-type]
        assert (into[0][4:] == 7).all() and (into[1][4:] == 7).all()
