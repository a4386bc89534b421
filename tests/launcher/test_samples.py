"""Samples on the host: their documents are known, and planned, before their microbatch."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_magi.adapter.carried_plan import carried_plan
from megatron_magi.launcher import samples as samples_module
from megatron_magi.launcher import session as launch_module
from megatron_magi.launcher.batch import dispatch_dict
from megatron_magi.launcher.documents import bounds_of_cu_seqlens, bounds_of_eod
from megatron_magi.launcher.model_hooks import _plan_of_middle_stage
from megatron_magi.launcher.samples import (
    ONE_THREAD,
    _note_labels,
    require_documents,
    wrap_dataset_builder,
    wrap_next_sample,
)
from megatron_magi.launcher.schedule import wrap_train_step
from megatron_magi.launcher.session import LauncherState
from tests.launcher.one_rank import launch_of

pytestmark = pytest.mark.usefixtures("alone")

LENGTH = 12
Threads = list[threading.Thread]


def sample(*bounds: int) -> dict[str, Any]:
    """A microbatch of one sample as the loader has it, with copies of the last boundary."""
    tokens = torch.arange(LENGTH)[None]
    cu_seqlens = torch.tensor([[*bounds, *bounds[-1:]]], dtype=torch.int32)
    return {"tokens": tokens, "labels": tokens + 1, "cu_seqlens": cu_seqlens}


def stream(count: int) -> list[dict[str, Any]]:
    return [sample(0, i + 1, LENGTH) for i in range(count)]


class Replayed:
    """What Megatron's RerunDataIterator does: it keeps the samples of a step."""

    def __init__(self, samples: Iterator[Any]) -> None:
        self.iterable, self.saved, self.place = samples, [], None  # type: ignore[var-annotated]

    def __next__(self) -> Any:
        if self.place is not None:
            self.place += 1
            return self.saved[self.place - 1]
        self.saved.append(copy.copy(found := next(self.iterable)))
        return found


@pytest.fixture
def launch() -> LauncherState:
    return launch_of(LENGTH, dataloader_inter_document_masking=True)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    """The thread of every plan that is made."""
    made_by, make = [], launch_module.make_packed_seq_params

    def noted(*args: Any, **kwargs: Any) -> Any:
        made_by.append(threading.current_thread())
        return make(*args, **kwargs)

    monkeypatch.setattr(launch_module, "make_packed_seq_params", noted)
    return made_by


@pytest.mark.parametrize("place", [None, 0, ONE_THREAD, 2 * ONE_THREAD + 1])
def test_a_step_knows_whether_a_token_counts(launch: LauncherState, place: int | None) -> None:
    mask = torch.zeros(1, 3 * ONE_THREAD)
    if place is not None:
        mask[0, place] = 1
    _note_labels(launch, {"loss_mask": mask})
    assert launch.stats.has_label is (place is not None)
    _note_labels(launch, {"loss_mask": torch.zeros(1, LENGTH)})  # of a later microbatch
    assert launch.stats.has_label is (place is not None)


def test_long_samples_wake_no_threads_of_pytorch(launch: LauncherState) -> None:
    """They took up to 100 ms; a copy is one memcpy, and numpy has one thread."""
    length = 4 * ONE_THREAD
    mask, tokens = torch.ones(1, length), torch.arange(length)[None]
    bounds = torch.tensor([[0, *[length] * length]], dtype=torch.int32)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        _note_labels(launch, {"loss_mask": mask})
        assert bounds_of_cu_seqlens(bounds, None, length) == [0, length]
        assert bounds_of_eod(tokens, 7) == [0, 8, length]
    views = "as_strided detach flatten narrow reshape resolve_conj resolve_neg slice split to view"
    long = {x.name for x in seen.events() if any(_elements(s) > ONE_THREAD for s in x.input_shapes)}
    assert "aten::view" in long
    assert not long - {"detach", *(f"aten::{name}" for name in views.split())}


def _elements(shape: list[int]) -> int:
    return math.prod(shape) if shape else 0


def hooked(launch: LauncherState) -> Any:
    """An iterator class with our hook in it."""
    return type("Hooked", (Replayed,), {"__next__": wrap_next_sample(Replayed.__next__, launch)})


def forward(launch: LauncherState, iterator: Any) -> list[int]:
    """One forward step of a stage that reads rows; the boundaries of its plan."""
    launch.microbatch.begin(iterator)
    batch = next(iterator)
    local = dispatch_dict(launch, batch)
    return documents_of(carried_plan(local["tokens"]))


def documents_of(packed: Any) -> list[int]:
    starts = (packed.rope_positions == 0).nonzero().reshape(-1).tolist()
    return [*starts, LENGTH]


def test_plans_are_ready_when_their_microbatch_comes(
    launch: LauncherState, threads: Threads
) -> None:
    iterator = hooked(launch)(iter(stream(6)))
    for i in range(6):
        assert forward(launch, iterator) == [0, i + 1, LENGTH]
    assert launch.stats.num_plans == 6 and threading.main_thread() not in threads
    with pytest.raises(StopIteration):
        forward(launch, iterator)


def test_plans_are_made_in_another_thread(launch: LauncherState, threads: Threads) -> None:
    iterator = hooked(launch)(iter(stream(4)))
    for _ in range(4):
        forward(launch, iterator)
    assert len(threads) == 4 and threading.main_thread() not in threads
    assert len(set(threads)) == 1


def test_validation_between_training_steps(launch: LauncherState, threads: Threads) -> None:
    training, validation = (hooked(launch)(iter(stream(8))) for _ in range(2))
    order = [training] * 3 + [validation] * 2 + [training] * 2 + [validation]
    places = [0, 1, 2, 0, 1, 3, 4, 2]
    for iterator, place in zip(order, places, strict=True):
        assert forward(launch, iterator) == [0, place + 1, LENGTH]
    assert threading.main_thread() not in threads


def test_a_replayed_step_has_its_plans_again(launch: LauncherState, threads: Threads) -> None:
    iterator = hooked(launch)(iter(stream(6)))
    first = [forward(launch, iterator) for _ in range(3)]
    iterator.place = 0
    assert [forward(launch, iterator) for _ in range(3)] == first
    iterator.place = None
    assert forward(launch, iterator) == [0, 4, LENGTH]
    assert threading.main_thread() not in threads


def test_virtual_stages_have_iterators_of_their_own(
    launch: LauncherState, threads: Threads
) -> None:
    first, second = (hooked(launch)(iter(stream(4))) for _ in range(2))
    for chunk in (first, first, second, second, first, second):
        forward(launch, chunk)
    assert launch.stats.num_plans == 6 and threading.main_thread() not in threads


def test_an_error_of_planning_comes_at_its_microbatch(
    launch: LauncherState, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = launch_module.make_packed_seq_params

    def failing(bounds: list[int], *args: Any, **kwargs: Any) -> Any:
        if bounds[1] == 3:
            raise MemoryError("no room for tables")
        return make(bounds, *args, **kwargs)

    monkeypatch.setattr(launch_module, "make_packed_seq_params", failing)
    iterator = hooked(launch)(iter(stream(4)))
    assert forward(launch, iterator) == [0, 1, LENGTH]
    assert forward(launch, iterator) == [0, 2, LENGTH]
    with pytest.raises(MemoryError, match="no room for tables"):
        forward(launch, iterator)
    assert forward(launch, iterator) == [0, 4, LENGTH]


def test_a_middle_stage_has_the_boundaries_of_its_sample(
    launch: LauncherState, threads: Threads
) -> None:
    """It draws the sample itself where Megatron does not, as with --reset-attention-mask."""
    iterator = hooked(launch)(iter(stream(4)))
    for i, stock in enumerate((None, "Megatron has drawn it")):
        launch.microbatch.begin(iterator)
        if stock is not None:
            next(iterator)
        for _ in range(2):  # asked twice, drawn once
            assert documents_of(_plan_of_middle_stage(launch, None)) == [0, i + 1, LENGTH]
    assert threading.main_thread() not in threads


def test_a_middle_stage_without_samples_is_an_error() -> None:
    launch = launch_of(LENGTH, reset_attention_mask=True)
    launch.eod = lambda: 3  # type: ignore[method-assign]
    launch.microbatch.begin(None)
    with pytest.raises(ValueError, match="require samples on every pipeline stage, got none"):
        _plan_of_middle_stage(launch, None)


@pytest.mark.parametrize(
    ("case", "bounds"),
    [
        pytest.param({"dataloader_type": "external"}, [0, 1, LENGTH], id="a loader that may save"),
        pytest.param({"mask": "tests.launcher.video_mask:frames"}, [0, 1, LENGTH], id="a mask"),
        pytest.param({}, None, id="no documents"),
    ],
)
def test_some_samples_are_not_drawn_ahead(case: dict[str, Any], bounds: list[int] | None) -> None:
    launch = launch_of(LENGTH, dataloader_inter_document_masking=bounds is not None, **case)
    iterator = hooked(launch)(samples := iter(stream(3)))
    launch.microbatch.begin(iterator)
    next(iterator)
    assert len(list(samples)) == 2 and launch.microbatch.bounds() == bounds


def test_samples_that_are_skipped_are_not_planned(launch: LauncherState) -> None:
    iterator = hooked(launch)(samples := iter(stream(3)))
    launch.sequences = None
    next(iterator)
    assert len(list(samples)) == 2 and not launch._ahead._futures


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_stage_with_documents_has_a_data_set(
    documents: bool, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: rank)
    made = SimpleNamespace()

    def build(self: Any, cls: Any, sizes: Any, is_built_on_rank: Any, config: Any) -> None:
        self.is_built = is_built_on_rank()

    launch = launch_of(LENGTH, reset_attention_mask=documents)
    wrap_dataset_builder(build, launch)(made, "GPT", [1], lambda: False, config=None)
    assert made.is_built == (documents and rank == 0)


@pytest.mark.parametrize(("mask", "lines"), [([0, 0], 1), ([0, 1], 0)])
def test_a_step_without_a_label_is_a_line(
    launch: LauncherState, mask: list[int], lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = [{**sample(0, LENGTH), "loss_mask": torch.tensor([[float(x)]])} for x in mask]
    iterator = hooked(launch)(iter(samples))
    launch.sequences = (1, LENGTH)

    def step() -> tuple[dict[str, torch.Tensor], int]:
        for _ in samples:
            next(iterator)
        return {"lm loss": torch.tensor(float("nan"))}, 0

    wrap_train_step(step, launch)()
    assert capsys.readouterr().out.count("a step had no label in the samples of rank 0") == lines


class Rerun(Replayed):
    """Stands for Megatron's class, for which `require_documents` asks."""


@pytest.mark.parametrize("several", [False, True])
def test_promised_documents_are_required_before_the_first_step(
    launch: LauncherState, several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples_module, "RerunDataIterator", Rerun)
    whole, without = sample(0, 5, LENGTH), sample(0, LENGTH)
    del without["cu_seqlens"]
    iterator = Rerun(iter([whole, whole]))
    require_documents(launch, [None, iterator] if several else iterator)
    assert next(iterator) is not None and next(iterator) is not None, "none was lost"
    with pytest.raises(ValueError, match="require cu_seqlens in every sample, got a sample"):
        require_documents(launch, Rerun(iter([without])))


def test_a_later_sample_without_documents_is_an_error(launch: LauncherState) -> None:
    without = {name: x for name, x in sample(0, LENGTH).items() if name != "cu_seqlens"}
    iterator = hooked(launch)(iter([sample(0, 5, LENGTH), without]))
    launch.sequences = (1, LENGTH)
    assert forward(launch, iterator) == [0, 5, LENGTH]
    with pytest.raises(ValueError, match="require cu_seqlens in every sample, got a sample"):
        forward(launch, iterator)
