"""Sums at home: what they keep alive."""

from __future__ import annotations

import torch

from megatron_magi.core.comm.group_reduce import sum_at_home


def test_sums_without_arrivals_keep_nothing_else_alive() -> None:
    buffer = torch.arange(24.0).view(6, 4)
    part, whole = buffer[:2], torch.ones(2, 4)
    got_part, got_whole = sum_at_home((part, whole), [], torch.float32)
    assert torch.equal(got_part, part) and got_part.untyped_storage().nbytes() == 2 * 4 * 4
    assert got_whole.data_ptr() == whole.data_ptr()
