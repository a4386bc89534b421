"""A launch as a value, and what happens to its inputs; runs without a GPU."""

from __future__ import annotations

import pytest
import torch

from megatron_magi import masks
from megatron_magi.core.kernel.hopper.choice import chosen_backward, chosen_forward
from megatron_magi.core.kernel.hopper.launch_values import HeadsKey, aligned, tile_counter
from tests.core.kernel import abi_on_cpu
from tests.core.kernel.hopper.launch_cases import NAMED, case


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x,
        lambda x: x.flatten()[8:].view(-1)[: 6 * 4 * 64].view(6, 4, 64),
        lambda x: x[:, 1:3],
    ],
    ids=["plain", "offset of 16 bytes", "some heads"],
)
def test_readable_inputs_are_not_copied(change: object) -> None:
    x = change(torch.zeros(8, 4, 64, dtype=torch.bfloat16))  # type: ignore[operator]
    assert aligned(x) is x


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.flatten()[1 : 1 + 6 * 4 * 64].view(6, 4, 64),
        lambda x: x[..., 1:33],
        lambda x: x.transpose(1, 2)[:, :4].contiguous().transpose(1, 2),
        lambda x: x[:1].expand(8, 4, 64),
    ],
    ids=["contiguous at an odd offset", "odd column", "columns not together", "repeated row"],
)
def test_other_inputs_become_aligned_copies(change: object) -> None:
    x = change(torch.randn(8, 4, 64).to(torch.bfloat16))  # type: ignore[operator]
    y = aligned(x)
    assert torch.equal(x, y)
    assert y.data_ptr() % 16 == 0 and y.is_contiguous()


def test_a_launch_can_be_printed(library: abi_on_cpu.CpuLibrary) -> None:
    call, _ = case(NAMED["causal"])
    key = HeadsKey.of(call)
    assert "head_dim 64" in str(chosen_forward(call.table, key))
    assert "deterministic" in str(chosen_backward(call.table, key, True))
    assert "deterministic" not in str(chosen_backward(call.table, key, False))


def test_a_launch_depends_on_heads_widths_and_device() -> None:
    call, _ = case(masks.causal(8), heads=(4, 2), widths=(192, 128))
    assert HeadsKey.of(call) == (4, 2, 192, 128, torch.device("cpu"))


def test_every_stream_counts_its_tiles_in_its_own_place() -> None:
    cpu = torch.device("cpu")
    first = tile_counter(cpu, 101)
    assert first.dtype == torch.int32 and first.tolist() == [0, 0]
    assert tile_counter(cpu, 101) is first and tile_counter(cpu, 102) is not first
    with torch.device("meta"):  # a job's default device, which is not that of the launch
        assert tile_counter(cpu, 103).tolist() == [0, 0]


def test_every_captured_launch_has_a_counter_of_its_own() -> None:
    """Two graphs may be replayed at the same time."""
    cpu = torch.device("cpu")
    kept = tile_counter(cpu, 101)
    first, second = (tile_counter(cpu, 101, captured=True) for _ in range(2))
    assert first.tolist() == second.tolist() == [0, 0] and first.dtype == torch.int32
    assert first is not second and first is not kept and second is not kept
    assert tile_counter(cpu, 101) is kept
