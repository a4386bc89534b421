"""Rows of several tensors side by side."""

import pytest
import torch

from megatron_magi.core.comm.row_buffer import concat_buffer, split_columns


@pytest.mark.parametrize("shapes", [[(2, 3)], [(2, 3), (2, 3)], [(2, 3), (4,), (2, 1)]], ids=str)
def test_columns_are_split_as_they_were_laid(shapes: list[tuple[int, ...]]) -> None:
    """Into views of one buffer, whether or not they are equally wide."""
    sizes = [torch.Size(shape) for shape in shapes]
    xs = [torch.randn(5, *shape, dtype=torch.float64) for shape in shapes]
    rows = concat_buffer(torch.zeros(1), 5, sizes, torch.float64)
    assert rows.dtype == torch.float64 and rows.shape == (5, sum(s.numel() for s in sizes))
    rows.copy_(torch.cat([x.flatten(1) for x in xs], 1))
    for part, x in zip(split_columns(rows, sizes), xs, strict=True):
        assert torch.equal(part, x)
        assert part.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
