"""Which heads the CUDA kernels take, and at what widths."""

from __future__ import annotations

import pytest
import torch

from megatron_magi import masks
from megatron_magi.core.kernel.backend import AttnCall
from megatron_magi.core.kernel.hopper import checks
from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.core.kernel.widths import Widths, compiled_widths, widths_of


@pytest.mark.parametrize(
    ("widths", "least"),
    [((1, 1), (64, 64)), ((64, 64), (64, 64)), ((65, 8), (128, 128)), ((8, 65), (128, 128)),
     ((129, 1), (192, 128)), ((192, 128), (192, 128)), ((193, 8), None), ((8, 129), None)],
)  # fmt: skip
def test_the_least_compiled_widths(widths: tuple[int, int], least: tuple[int, int] | None) -> None:
    assert compiled_widths(Widths(*widths)) == least


@pytest.mark.parametrize("widths", [(256, 256), (192, 192), (200, 64)], ids=str)
def test_a_call_with_wider_heads_is_refused(widths: tuple[int, int]) -> None:
    q, v = (torch.zeros(4, 2, width, dtype=torch.bfloat16) for width in widths)
    call = AttnCall(q, q, v, SliceTable(masks.causal(4).slices, 4, 4), 0.1)
    text = rf"up to 192 and values up to 128, got {widths[0]} and {widths[1]}; use the backend"
    with pytest.raises(NotImplementedError, match=text):
        checks.widths_for(call)


def test_widths_are_those_of_keys_and_of_values() -> None:
    q, v = torch.zeros(4, 2, 24), torch.zeros(4, 2, 16)
    call = AttnCall(q, q, v, SliceTable(masks.causal(4).slices, 4, 4), 0.1)
    assert widths_of(q, v) == (24, 16) and checks.widths_for(call) == (64, 64)
