"""Plans of Megatron's own rows under context parallelism, which CUDA graphs hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_magi import masks
from megatron_magi.adapter.plain_plan import mirrored_layout, plain_plan
from megatron_magi.config import MagiConfig
from tests.adapter.test_core_attention import model


@pytest.mark.parametrize(("cp_size", "length", "count"), [(2, 12, 1), (3, 36, 2), (4, 16, 3)])
def test_a_rank_has_the_rows_that_megatron_gives_it(cp_size: int, length: int, count: int) -> None:
    rows = torch.arange(length * count).view(count, length)
    layout = mirrored_layout(length // cp_size, count, cp_size)
    for rank in range(cp_size):
        pieces = rows.view(count, 2 * cp_size, -1)[:, [rank, 2 * cp_size - 1 - rank]]
        assert pieces.flatten().tolist() == layout.position_ids(rank).tolist()


def test_every_sequence_is_causal_and_balanced() -> None:
    config = model(context_parallel_size=4, window_size=(5, 0))
    settings = MagiConfig(chunk_size=32, deterministic=True)
    whole, local = (plain_plan(32, 2, window, config, settings) for window in (False, True))
    assert whole.mask == masks.from_cu_seqlens([0, 128, 256])
    assert local.mask == masks.from_cu_seqlens([0, 128, 256], window_size=(5, 0))
    assert whole.layout == local.layout == mirrored_layout(32, 2, 4)
    assert whole.config.deterministic and whole.config.transport == "all_to_all"
    assert np.ptp(whole.loads) == 0
    assert plain_plan(32, 2, False, config, settings) is whole


def test_rows_and_transports_that_no_graph_can_repeat() -> None:
    config = model(context_parallel_size=2)
    with pytest.raises(ValueError, match=r"two pieces of each sequence .* got 9 rows; use"):
        plain_plan(9, 1, False, config, MagiConfig())
    with pytest.raises(ValueError, match="require transport 'all_to_all', got 'symm_mem'"):
        plain_plan(8, 1, False, config, MagiConfig(transport="symm_mem"))
    alone = plain_plan(9, 1, False, model(), MagiConfig(transport="symm_mem"))
    assert alone.layout.num_local_tokens == 9
