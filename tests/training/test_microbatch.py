"""A sample as a microbatch: its masks, its rows on this rank, and one stream a model chunk."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_magi.adapter.rank_batch import batch_id_of
from megatron_magi.training.data.packed_samples import PackedSample, mask_of_documents
from megatron_magi.training.recipe.run_config import RunConfig
from megatron_magi.training.recipe.run_values import DataConfig, ParallelConfig, TrainConfig
from megatron_magi.training.run import microbatch
from megatron_magi.training.run.microbatch import Microbatch, microbatch_streams

CPU = torch.device("cpu")
ENDS = np.array([0, 3, 8], np.int32)


def sample(index: int = 0) -> PackedSample:
    tokens = np.arange(8) + 8 * index
    counted = (np.arange(8) % 3 > 0).astype(np.float32)
    return PackedSample(index, tokens, tokens + 1, counted, ENDS, (4, 5))


def made(attention: Any, mask: Any = "document") -> Microbatch:
    run = RunConfig(attention=attention, data=DataConfig("x", seq_length=8, mask=mask))
    model_config: Any = None  # only a plan needs it
    return microbatch._make(sample(), run, model_config, None, CPU)


@pytest.mark.parametrize("mask", ["document", "causal"])
def test_the_dense_baseline_hides_what_the_mask_does_not_show(mask: Any) -> None:
    found = made("dense", mask)
    seen = mask_of_documents(sample().cu_seqlens, DataConfig("x", mask=mask)).to_dense()
    assert found.baseline_mask is not None and found.baseline_mask.shape == (1, 1, 8, 8)
    assert np.array_equal(~found.baseline_mask[0, 0].numpy(), seen)
    assert found.area == seen.sum() and found.packed is None and found.imbalance == 1.0


@pytest.mark.parametrize("attention", ["sdpa", "flex_plain"])
def test_other_baselines_have_numbers_of_documents(attention: str) -> None:
    numbers, causal = made(attention).baseline_mask, made(attention, "causal").baseline_mask
    assert numbers is not None and numbers.tolist() == [0] * 3 + [1] * 5
    assert causal is not None and causal.tolist() == [0] * 8


def test_a_baselines_rows_are_the_whole_sample() -> None:
    local = made("dense").local(True, CPU, None)
    inputs = local.model_inputs()
    assert inputs["input_ids"].tolist() == [sample().tokens.tolist()]
    assert inputs["labels"].tolist() == [sample().labels.tolist()]
    assert inputs["loss_mask"].tolist() == [sample().loss_mask.tolist()]
    assert inputs["attention_mask"].dtype == torch.bool and inputs["packed_seq_params"] is None


def test_a_stage_without_embedding_or_loss_gets_the_mask_alone() -> None:
    inputs = made("dense").local(False, CPU, None).model_inputs()
    assert inputs["attention_mask"].shape == (1, 1, 8, 8)
    assert {name for name, value in inputs.items() if value is not None} == {"attention_mask"}


@pytest.mark.parametrize("mask", ["document", "causal"])
def test_ours_is_planned_for_the_mask_and_dispatched(
    monkeypatch: pytest.MonkeyPatch, mask: Any
) -> None:
    given: dict[str, Any] = {}
    packed = SimpleNamespace(token_plan=SimpleNamespace(imbalance=1.25))

    def plan(cu_seqlens: Any, model_config: Any, cp_group: Any, **more: Any) -> Any:
        given.update(more, cu_seqlens=cu_seqlens)
        return packed

    monkeypatch.setattr(microbatch, "make_packed_seq_params", plan)
    monkeypatch.setattr(
        microbatch, "dispatch_batch", lambda *arguments, batch_id: (*arguments, batch_id)
    )
    found = made("magi", mask)
    assert found.imbalance == 1.25 and found.baseline_mask is None
    assert given["mask"] == mask_of_documents(sample().cu_seqlens, DataConfig("x", mask=mask))
    bounds = ENDS if mask == "document" else [0, len(sample().tokens)]
    assert np.array_equal(given["cu_seqlens"], bounds)
    dispatched: Any = found.local(True, CPU, "group")
    batch, *rest, batch_id = dispatched
    assert batch.tokens.tolist() == [sample().tokens.tolist()] and rest == [packed, "group"]
    assert batch_id == batch_id_of(batch.tokens)
    without_rows: Any = found.local(False, CPU, "group")
    assert without_rows[0] is None


class Dataset:
    """Samples by number, and which were made."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def __getitem__(self, index: int) -> PackedSample:
        self.taken.append(index)
        return sample(index)

    def boundaries(self, index: int) -> np.ndarray:
        """Documents of 128 tokens, and one of 1,024 in every third sample."""
        return np.array([0, 1024] if index % 3 == 0 else range(0, 1025, 128), np.int32)


@pytest.fixture
def second_of_two_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = SimpleNamespace(
        get_context_parallel_group=lambda: None,
        get_data_parallel_rank=lambda: 1,
        get_data_parallel_world_size=lambda: 2,
    )
    monkeypatch.setattr(microbatch, "parallel_state", groups)


def streams(dataset: Dataset, vpp: int | None = None, **more: Any) -> list[Any]:
    run = RunConfig(
        attention="dense",
        data=DataConfig(
            "x",
            seq_length=8,
            step_order=more.pop("order", "forward"),
            balance_steps=more.pop("balance_steps", None),
        ),
        train=TrainConfig(global_batch_size=4),
        parallel=ParallelConfig(pp=2 if vpp else 1, vpp=vpp),
    )
    given: Any = dataset
    no_plan: Any = None
    return microbatch_streams(given, run, no_plan, CPU, **more)


@pytest.mark.usefixtures("second_of_two_replicas")
@pytest.mark.parametrize(
    ("order", "numbers"), [("forward", [9, 11, 13, 15]), ("reversed", [10, 8, 14, 12])]
)
def test_a_stream_is_this_replicas_share_of_so_many_batches(order: str, numbers: list[int]) -> None:
    (stream,) = streams(Dataset(), first_sample=8, num_batches=2, order=order)
    assert [item.sample.index for item in stream] == numbers


@pytest.mark.usefixtures("second_of_two_replicas")
@pytest.mark.parametrize(
    ("steps", "numbers"), [(1, [8, 10, 14, 15]), (2, [8, 12, 11, 14]), (None, [9, 11, 13, 15])]
)
def test_samples_of_equal_cost_share_a_step(steps: int | None, numbers: list[int]) -> None:
    """Of 8 to 15 the costly ones are 9, 12 and 15: in two steps of their own the other replica has
    9 and 11, then 12 and 13; exchanged, 8 joins these three, and the other replica has 9 and 15."""
    (stream,) = streams(Dataset(), first_sample=8, num_batches=2, balance_steps=steps)
    assert [item.sample.index for item in stream] == numbers


@pytest.mark.usefixtures("second_of_two_replicas")
def test_model_chunks_share_microbatches_that_are_made_once() -> None:
    dataset = Dataset()
    first, second = streams(dataset, vpp=2, num_batches=1)
    pairs = list(zip(first, second, strict=True))
    assert len(pairs) == 2 and all(a is b for a, b in pairs)
    assert dataset.taken == [1, 3]
