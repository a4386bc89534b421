"""One rank's view: what its exchanges hold, and how large its buffers are."""

from __future__ import annotations

from megatron_magi.core.plan.rank_plan import most_buffered_rows


def test_buffers_are_those_of_two_stages_that_exchange(stages: list) -> None:
    assert sum(stage.cast is None for stage in stages) == 4
    local, *remote = stages[:4]
    sizes = [stage.num_keys for stage in remote]
    assert local.num_own == local.num_keys > 0 and all(sizes)
    assert most_buffered_rows([local]) == 0
    assert most_buffered_rows([local, remote[0]]) == sizes[0]
    assert most_buffered_rows([local, *remote]) == max(sizes[0] + sizes[1], sizes[1] + sizes[2])


def test_slices_of_a_stage_cannot_be_changed(stages: list) -> None:
    assert not any(stage.slices.flags.writeable for stage in stages)
