"""Rotary angles by the positions of a rank's rows, against Megatron's own of a whole sequence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import (
    MultimodalRotaryEmbedding,
    RotaryEmbedding,
)
from torch import Tensor

from megatron_magi.adapter.packed import MagiPackedSeqParams
from megatron_magi.adapter.rope import MagiRotaryEmbedding, rotary_of_rows

POSITIONS = [0, 1, 2, 0, 7, 3]


def stock(**changes: Any) -> RotaryEmbedding:
    return RotaryEmbedding(8, rotary_percent=1.0, use_cpu_initialization=True, **changes)


@pytest.fixture(autouse=True)
def megatron_stays_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It moves frequencies to the current GPU, also where there is none."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")


def packed(positions: list[int]) -> MagiPackedSeqParams:
    made = MagiPackedSeqParams.__new__(MagiPackedSeqParams)
    made.rope_positions = torch.tensor(positions)
    made.max_seqlen_q = made.max_seqlen_kv = 8
    return made


def angles(rope: MagiRotaryEmbedding, params: MagiPackedSeqParams | None) -> Tensor:
    """As Megatron calls it in a model's forward."""
    config = SimpleNamespace(sequence_parallel=False, context_parallel_size=1)
    block = SimpleNamespace(input_tensor=None)
    rope.get_rotary_seq_len(None, block, torch.zeros(8, 1, 4), config, params)
    return rope(8)


@pytest.mark.parametrize(
    "changes",
    [{}, {"seq_len_interpolation_factor": 4.0}, {"rotary_interleaved": True},
     {"rope_scaling": True, "rope_scaling_factor": 8.0}],
    ids=str,
)  # fmt: skip
def test_each_row_has_the_angles_of_its_position(changes: dict[str, Any]) -> None:
    whole = stock(**changes)(8)
    got = angles(MagiRotaryEmbedding.from_stock(stock(**changes)), packed(POSITIONS))
    assert got.shape == (len(POSITIONS), 1, 1, 8)
    torch.testing.assert_close(got, whole[POSITIONS])


def test_without_our_batch_it_is_the_stock_module() -> None:
    ours = MagiRotaryEmbedding.from_stock(stock())
    assert torch.equal(angles(ours, None), stock()(8))


def test_the_next_microbatch_has_its_own_positions() -> None:
    ours, whole = MagiRotaryEmbedding.from_stock(stock()), stock()(8)
    for positions in ([3, 4], [0, 5], [3, 4]):
        torch.testing.assert_close(angles(ours, packed(positions)), whole[positions])
    assert torch.equal(angles(ours, None), whole), "positions of an earlier batch are gone"


def test_ours_stays_what_it_is() -> None:
    ours = MagiRotaryEmbedding.from_stock(stock())
    assert rotary_of_rows(ours) is ours


def multimodal(cp_size: int) -> MultimodalRotaryEmbedding:
    group = SimpleNamespace(size=lambda: cp_size, rank=lambda: 1)
    return MultimodalRotaryEmbedding(8, rotary_percent=1.0, cp_group=group)


def test_mrope_takes_the_positions_of_the_rows_as_they_come() -> None:
    positions = torch.tensor([[[4, 4, 4, 9]], [[4, 5, 6, 9]], [[4, 4, 5, 9]]])
    ours, section = rotary_of_rows(multimodal(2)), [1, 2, 1]
    assert rotary_of_rows(ours) is ours
    got = ours(positions, section, cp_group=ours.cp_group)
    assert torch.equal(got, multimodal(1)(positions, section))


@pytest.mark.parametrize("shape", [(1, 4), (2, 1, 4)])
def test_mrope_needs_three_positions_a_row(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"requires position_ids \[3, batch, rows of this rank\]"):
        rotary_of_rows(multimodal(2))(torch.zeros(shape), [1, 2, 1])


def test_another_rotary_embedding_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"requires rope, yarn, mrope.*got Identity"):
        rotary_of_rows(torch.nn.Identity())
