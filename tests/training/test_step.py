"""A step's sums over the world, a bad loss in one error, and what Megatron's schedule is given."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_magi.training.recipe.run_config import RunConfig
from megatron_magi.training.recipe.run_values import DataConfig, TrainConfig
from megatron_magi.training.run import step
from megatron_magi.training.run.step import BatchSums, StepSchedule, StepSums, TrainingStopped

CPU = torch.device("cpu")


def report(index: int, loss: float, tokens: float = 3.0) -> dict[str, Any]:
    """Of a microbatch of 10 visible cells and imbalance 1.5."""
    sample = SimpleNamespace(index=index)
    microbatch = SimpleNamespace(sample=sample, area=10, imbalance=1.5)
    return {"lm loss": torch.tensor([loss, tokens]), "microbatch": microbatch}


def place(monkeypatch: pytest.MonkeyPatch, tp: int = 0, cp: int = 0) -> None:
    """This rank's places in its groups."""
    ranks = SimpleNamespace(
        get_tensor_model_parallel_rank=lambda: tp, get_context_parallel_rank=lambda: cp
    )
    monkeypatch.setattr(step, "parallel_state", ranks)


def test_the_mean_is_over_counted_tokens_if_there_are_any() -> None:
    assert BatchSums(6.0, 3.0, 1.0, 1.0, 1.0).mean_loss == 2.0
    assert BatchSums(0.0, 0.0, 1.0, 1.0, 1.0).mean_loss == 0.0


@pytest.mark.parametrize(
    ("tp", "cp", "sums"),
    [
        (0, 0, [5.0, 6.0, 20.0, 3.0, 2.0]),
        (0, 1, [5.0, 6.0, 0.0, 0.0, 0.0]),  # rank 0 of the group counts the rest
        (1, 0, [0.0] * 5),
    ],
)
def test_what_ranks_have_in_common_is_counted_once(
    monkeypatch: pytest.MonkeyPatch, tp: int, cp: int, sums: list[float]
) -> None:
    place(monkeypatch, tp, cp)
    found = step._sums_of_rank([report(0, 2.0), report(1, 3.0)], CPU)
    assert found.tolist() == sums and found.dtype == torch.float64
    assert step._sums_of_rank([], CPU).tolist() == [0.0] * 5, "an earlier pipeline stage"


def test_sums_are_those_of_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    place(monkeypatch)
    monkeypatch.setattr(step.dist, "all_reduce", lambda sums: sums.mul_(4))
    dataset: Any = None
    sums = StepSums.start([report(0, 2.0)], CPU).read(dataset, 1)
    assert sums == BatchSums(8.0, 12.0, 40.0, 6.0, 4.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_the_run_with_ranks_and_documents(
    monkeypatch: pytest.MonkeyPatch, bad: float
) -> None:
    def gather(gathered: list[list[str]], mine: list[str]) -> None:
        gathered[:] = [["rank 0: of another rank"], mine]

    world = SimpleNamespace(get_rank=lambda: 1, get_world_size=lambda: 2, all_gather_object=gather)
    monkeypatch.setattr(step, "dist", world)
    dataset: Any = SimpleNamespace(document_names=lambda sample: [f"d{sample.index}"] * 20)
    sums = StepSums(torch.tensor([bad, 1.0, 1.0, 1.0, 1.0]), None, [report(6, 1.0), report(7, bad)])
    with pytest.raises(TrainingStopped) as error:
        sums.read(dataset, 12)
    named = ", ".join(["d7"] * 8)  # a few are enough
    where = f"rank 0: of another rank; rank 1: sample 7, documents {named}; look at"
    assert f"got nan or inf at iteration 12 on {where}" in str(error.value)


@pytest.mark.parametrize("num_chunks", [1, 2])
@pytest.mark.parametrize("train", [True, False])
def test_megatron_is_given_the_replicas_microbatches(
    monkeypatch: pytest.MonkeyPatch, num_chunks: int, train: bool
) -> None:
    given: dict[str, Any] = {}
    finished: list[bool] = []
    monkeypatch.setattr(
        step, "get_forward_backward_func", lambda: lambda **more: given.update(more) or []
    )
    monkeypatch.setattr(step, "finish_pipeline_agreement", lambda: finished.append(True))
    monkeypatch.setattr(step.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(step.StepSums, "start", lambda reports, device: (reports, device))
    run = RunConfig(
        attention="dense",
        data=DataConfig("x", seq_length=48),
        train=TrainConfig(global_batch_size=6),
    )
    chunks, streams = [object() for _ in range(num_chunks)], [iter(()) for _ in range(num_chunks)]
    model_config: Any = None
    assert StepSchedule(run, model_config, chunks, CPU)(streams, train=train) == ([], CPU)
    assert (given["num_microbatches"], given["seq_length"], given["micro_batch_size"]) == (3, 48, 1)
    assert given["forward_only"] is not train and finished == [True]
    alone = num_chunks == 1  # Megatron takes a list for the interleaved schedule alone
    assert given["model"] is (chunks[0] if alone else chunks)
    assert given["data_iterator"] is (streams[0] if alone else streams)
