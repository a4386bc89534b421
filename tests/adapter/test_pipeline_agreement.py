"""Pipeline stages agree where there are some: not without Megatron's groups."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from megatron.core import parallel_state

import megatron_magi.adapter  # noqa: F401
from megatron_magi.adapter import pipeline_agreement


@pytest.mark.parametrize("has_torch", [False, True])
def test_without_megatrons_groups_there_is_nothing_to_agree_on(
    has_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: has_torch)
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: False)
    assert pipeline_agreement._model_parallel_group() is None


@pytest.mark.parametrize(("size", "is_one"), [(1, False), (2, True)])
def test_a_group_of_one_rank_agrees_with_itself(
    size: int, is_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = object()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda asked: size if asked is group else 0)
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(parallel_state, "get_model_parallel_group", lambda: group)
    assert (pipeline_agreement._model_parallel_group() is group) == is_one


def test_the_end_of_a_step_waits_for_both_kinds_of_comparisons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of pipeline stages and tensor-parallel ranks, and those of context-parallel ranks."""
    finished: list[object] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(pipeline_agreement, "_model_parallel_group", lambda: "model")
    monkeypatch.setattr(parallel_state, "get_context_parallel_group", lambda: "context")
    monkeypatch.setattr(pipeline_agreement, "finish_agreement", finished.append)
    pipeline_agreement.finish_pipeline_agreement()
    assert finished == ["model", "context"]
