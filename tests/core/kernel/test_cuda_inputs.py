"""What the CUDA kernels' Python side does to its inputs; runs without a GPU."""

from __future__ import annotations

import pytest
import torch

from megatron_magi.core.kernel.hopper.launch import aligned


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
