"""Which heads the CUDA kernels take, and at what widths."""

from __future__ import annotations

import pytest
import torch

from megatron_magi.core.kernel.head_dims import HeadDims, compiled_widths, widths_of


@pytest.mark.parametrize(
    ("widths", "least"),
    [((1, 1), (64, 64)), ((64, 64), (64, 64)), ((65, 8), (96, 96)), ((8, 65), (96, 96)),
     ((96, 96), (96, 96)), ((80, 80), (96, 96)), ((97, 8), (128, 128)), ((8, 97), (128, 128)),
     ((129, 1), (192, 128)), ((192, 128), (192, 128)), ((193, 8), (256, 256)),
     ((8, 129), (256, 256)), ((192, 192), (256, 256)), ((256, 256), (256, 256)),
     ((257, 8), None), ((8, 257), None)],
)  # fmt: skip
def test_the_least_compiled_widths(widths: tuple[int, int], least: tuple[int, int] | None) -> None:
    assert compiled_widths(HeadDims(*widths)) == least


def test_widths_are_those_of_keys_and_of_values() -> None:
    assert widths_of(torch.zeros(4, 2, 24), torch.zeros(4, 2, 16)) == (24, 16)
