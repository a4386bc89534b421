"""Boundaries of documents in Bridge's batches, in today's names and those of older data sets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_magi.bridge import schedule
from megatron_magi.bridge.batch import with_documents
from megatron_magi.bridge.launch import BridgeLaunch
from megatron_magi.bridge.vision import pack_multiple, pad_packs
from megatron_magi.config import MagiConfig
from megatron_magi.launcher.documents import bounds_of_sample
from megatron_magi.launcher.flags import LauncherOptions


def row(*bounds: int) -> torch.Tensor:
    return torch.tensor([bounds], dtype=torch.int32)


@pytest.mark.parametrize(
    ("sample", "bounds"),
    [
        ({"cu_seqlens_q": row(0, 5, 12, 12)}, [0, 5, 12, 16]),
        ({"cu_seqlens_q": row(0, 5, 12)[0]}, [0, 5, 12, 16]),
        (
            {"cu_seqlens_q": row(0, 5, 8, 8), "cu_seqlens_q_padded": row(0, 8, 12, 16)},
            [0, 5, 8, 11, 12, 16],
        ),
        ({"cu_seqlens": row(0, 5, 16, -1, -1), "cu_seqlens_argmin": torch.tensor(3)}, [0, 5, 16]),
        (
            {"cu_seqlens": row(0, 8, 16, -1), "cu_seqlens_unpadded": row(0, 5, 13, -1)},
            [0, 5, 8, 16],
        ),
        ({}, [0, 16]),
    ],
    ids=["tail", "one row", "padded", "sentinels", "unpadded", "none"],
)
def test_documents_of_a_sample(sample: dict[str, Any], bounds: list[int]) -> None:
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    assert bounds_of_sample(with_documents({"tokens": tokens, **sample}), None) == bounds


def test_several_packed_samples_are_left_for_the_launcher_to_refuse() -> None:
    several = torch.tensor([[0, 5, 16], [0, 9, 16]], dtype=torch.int32)
    assert with_documents({"cu_seqlens_q": several})["cu_seqlens"] is several


class Views:
    """One data loader seen by several model chunks, as Bridge gives it for virtual stages."""

    def __init__(self, loader: Iterator[Any]) -> None:
        self._loader = loader
        self._drawn: list[Any] = []

    def view(self) -> Iterator[Any]:
        for index in itertools.count():
            if index == len(self._drawn):
                self._drawn.append(next(self._loader))
            yield self._drawn[index]


def test_no_sample_of_the_next_step_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step draws of its own views is lost with them."""
    launch = BridgeLaunch(LauncherOptions(MagiConfig()))
    launch.args = SimpleNamespace(reset_attention_mask=True)
    monkeypatch.setattr(launch, "eod", lambda: 0)
    monkeypatch.setattr(schedule, "run_schedule", lambda launch, step, **given: step(**given))
    loader = iter([{"tokens": torch.full((1, 16), number)} for number in range(1, 30)])

    def step(data_iterator: list[Iterator[Any]], num_microbatches: int) -> list[list[int]]:
        return [[int(next(each)["tokens"][0, 0]) for each in data_iterator]
                for _ in range(num_microbatches)]  # fmt: skip

    for first in (1, 5, 9):
        views = Views(loader)
        run = schedule.wrap_get_schedule(lambda: step, launch)()
        given = [views.view(), views.view()]
        assert run(data_iterator=given, num_microbatches=4) == [[first + i] * 2 for i in range(4)]


def test_packs_of_qwen3_vl_are_padded_to_what_no_plan_pads() -> None:
    model = SimpleNamespace(
        context_parallel_size=2, tensor_model_parallel_size=2, sequence_parallel=True
    )
    dataset = SimpleNamespace(in_batch_packing_pad_to_multiple_of=12)
    config = SimpleNamespace(model=model, dataset=dataset)
    assert pad_packs(config, MagiConfig()) == (
        "dataset.in_batch_packing_pad_to_multiple_of is 96, was 12: the plan pads no row that "
        "Qwen3-VL selects"
    )
    assert dataset.in_batch_packing_pad_to_multiple_of == 96
    assert pad_packs(config, MagiConfig()) is None


def test_boundaries_are_promised_by_the_names_of_bridge() -> None:
    launch = BridgeLaunch(LauncherOptions(MagiConfig()))
    assert launch.lacks_documents({"tokens": None})
    assert not launch.lacks_documents({"input_ids": None, "cu_seqlens_q": row(0, 5, 16)})
    assert not launch.lacks_documents(None)


@pytest.mark.parametrize(
    ("cp_size", "chunk_size", "multiple"), [(4, None, 32), (4, 5, 20), (1, None, 1)]
)
def test_the_multiple_of_packs(cp_size: int, chunk_size: int | None, multiple: int) -> None:
    model = SimpleNamespace(
        context_parallel_size=cp_size, tensor_model_parallel_size=2, sequence_parallel=False
    )
    assert pack_multiple(model, MagiConfig(chunk_size=chunk_size)) == multiple
