"""What takes the place of Megatron's slicing: rows of the joined stream that carry their plan."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_magi import AttnMask, masks
from megatron_magi.adapter.carried_plan import carried_plan
from megatron_magi.adapter.packed import MagiPackedSeqParams
from megatron_magi.launcher.batch import (
    dispatch_dict,
    replace_cp_batch,
    replace_scheduled_batch,
    wrap_sft_dataset,
)
from megatron_magi.launcher.documents import MaskRequest
from megatron_magi.launcher.session import LauncherState
from tests.launcher.one_rank import launch_of

pytestmark = pytest.mark.usefixtures("alone")


def rows(count: int, length: int) -> dict[str, Any]:
    """A full batch as Megatron has it, every row another number."""
    tokens = torch.arange(1, count * length + 1).view(count, length)
    return {
        "tokens": tokens,
        "labels": tokens + 100,
        "loss_mask": (tokens % 3 > 0).float(),
        "position_ids": torch.arange(length).expand(count, length),
        "attention_mask": torch.ones(count, 1, length, length, dtype=torch.bool),
    }


def plan_of(batch: dict[str, Any]) -> MagiPackedSeqParams:
    packed = carried_plan(batch["tokens"])
    assert packed is not None
    return packed


def triangle(*lengths: int) -> int:
    """Visible pairs of causal documents."""
    return sum(n * (n + 1) // 2 for n in lengths)


def test_samples_are_joined_to_one_stream() -> None:
    given = rows(2, 8)
    local = dispatch_dict(launch_of(8, count=2), given)
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        assert torch.equal(local[name], given[name].reshape(1, 16)), name
    assert local["attention_mask"] is None and local.keys() == given.keys()
    assert plan_of(local).token_plan.mask.area() == triangle(8, 8)
    assert carried_plan(local["labels"]) is plan_of(local)


def test_the_given_batch_stays_as_it_is() -> None:
    """Megatron may replay it."""
    given = rows(1, 8)
    before = dict(given)
    dispatch_dict(launch_of(8), given)
    assert given.keys() == before.keys() and all(given[name] is before[name] for name in given)
    assert carried_plan(given["tokens"]) is None


def test_documents_are_those_of_cu_seqlens() -> None:
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    local = dispatch_dict(launch_of(8), {**rows(1, 8), "cu_seqlens": bounds})
    assert plan_of(local).token_plan.mask.area() == triangle(3, 5)
    padded = {"cu_seqlens": torch.tensor([0, 3, 7]), "cu_seqlens_padded": torch.tensor([0, 4, 8])}
    local = dispatch_dict(launch_of(8), {**rows(1, 8), **padded})
    assert plan_of(local).token_plan.mask.area() == triangle(3, 1, 4)


def test_documents_end_at_eod_if_masks_are_reset_there(monkeypatch: pytest.MonkeyPatch) -> None:
    training = ModuleType("megatron.training")
    training.get_tokenizer = lambda: SimpleNamespace(eod=5)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    for reset, area in ((True, triangle(5, 3)), (False, triangle(8))):
        local = dispatch_dict(launch_of(8, reset_attention_mask=reset), rows(1, 8))
        assert plan_of(local).token_plan.mask.area() == area


def test_a_mask_by_name_is_asked_for_the_batch() -> None:
    launch = launch_of(48, mask="tests.launcher.video_mask:frames")
    local = dispatch_dict(launch, rows(1, 48))
    assert plan_of(local).token_plan.mask.area() == 24 * 24 + 24 * 48


def test_virtual_stages_need_one_mask_for_a_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model chunk asks for it; one that counts calls would give layers different masks."""
    calls = itertools.count()

    def counted(request: MaskRequest) -> AttnMask:
        return masks.from_cu_seqlens([0, 1 + next(calls), request.total_seqlen])

    monkeypatch.setattr(sys.modules[__name__], "counted", counted, raising=False)
    named = f"{__name__}:counted"
    dispatch_dict(launch_of(8, mask=named), rows(1, 8))
    virtual = launch_of(8, mask=named, virtual_pipeline_model_parallel_size=2)
    with pytest.raises(ValueError, match="got two masks; let it depend on its request alone"):
        dispatch_dict(virtual, rows(1, 8))
    frames = launch_of(
        48, mask="tests.launcher.video_mask:frames", virtual_pipeline_model_parallel_size=2
    )
    local = dispatch_dict(frames, rows(1, 48))
    assert plan_of(local).token_plan.mask.area() == 24 * 24 + 24 * 48


def test_a_mask_function_may_not_replace_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have been taken, so that others would not be dispatched."""

    def replacing(request: MaskRequest) -> AttnMask:
        request.batch["loss_mask"] = torch.zeros(1, 8)  # type: ignore[index]
        return masks.from_cu_seqlens(request.bounds)

    monkeypatch.setattr(sys.modules[__name__], "replacing", replacing, raising=False)
    with pytest.raises(TypeError, match="does not support item assignment"):
        dispatch_dict(launch_of(8, mask=f"{__name__}:replacing"), rows(1, 8))


def test_rows_that_a_stage_does_not_read_stay_absent() -> None:
    given = {**rows(1, 8), "tokens": None, "position_ids": None}
    local = dispatch_dict(launch_of(8), given)
    assert local["tokens"] is None and local["position_ids"] is None
    assert torch.equal(local["labels"], given["labels"])


def test_batches_outside_a_schedule_are_not_planned() -> None:
    launch = launch_of(8)
    launch.sequences = None
    batch = {"tokens": torch.arange(8)[None], "labels": None}
    assert dispatch_dict(launch, batch) is batch


def test_a_batch_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must hold some of tokens, labels.*got images, tokens;"):
        dispatch_dict(launch_of(8), {"images": torch.ones(2), "tokens": None})


def never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("Megatron's own slicing ran")


def test_megatrons_slicing_is_left_out() -> None:
    given = rows(1, 8)
    hooked = replace_cp_batch(never, launch_of(8))
    local = hooked(given, is_hybrid_cp=False, cp_group="ignored")
    assert torch.equal(local["tokens"], given["tokens"]) and carried_plan(local["tokens"])


@pytest.mark.parametrize("by_name", [False, True])
def test_conversations_are_not_padded_for_ranks(by_name: bool) -> None:
    config = SimpleNamespace(context_parallel_size=4, sequence_length=64)
    made = SimpleNamespace()

    def build(self: Any, dataset: str, config: Any, split: str = "train") -> None:
        self.seen = dataset, config.context_parallel_size, config.sequence_length, split

    wrapped = wrap_sft_dataset(build, launch_of(8))
    if by_name:
        wrapped(made, "chats", split="valid", config=config)
    else:
        wrapped(made, "chats", config, "valid")
    assert made.seen == ("chats", 1, 64, "valid")
    assert config.context_parallel_size == 4, "other datasets share the config"


def scheduled(launch: LauncherState, stream: dict[str, Tensor | None], padding: list[int]) -> Any:
    """Through the hook of 0.20, whose own function gets a group of one rank."""

    def original(iterator: Any, *, vpp_size: int, pg_collection: Any) -> Any:
        assert (pg_collection.cp.size(), pg_collection.cp.rank()) == (1, 0)
        assert (pg_collection.tp, pg_collection.pp, vpp_size) == ("tp", "pp", 2)
        params = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 3, 7]))
        names = ("tokens", "labels", "loss_mask")
        whole = [stream[name] for name in names]
        return (*whole, "dense", stream["position_ids"], params, torch.tensor([padding]).bool())

    groups = SimpleNamespace(tp="tp", pp="pp", cp="never asked")
    return replace_scheduled_batch(original, launch)(iter(()), vpp_size=2, pg_collection=groups)


PADDING = [0, 0, 0, 0, 0, 0, 0, 1]


def test_a_scheduled_stream_is_assembled_whole_and_then_dispatched() -> None:
    stream = rows(1, 8)
    tokens, labels, loss_mask, dense, positions, params, padding = scheduled(
        launch_of(8), stream, PADDING
    )
    for name, got in (("tokens", tokens), ("labels", labels), ("position_ids", positions)):
        assert torch.equal(got, stream[name]), name
    assert torch.equal(loss_mask, stream["loss_mask"]) and dense is None
    packed = carried_plan(tokens)
    assert packed is not None and packed.token_plan.mask.area() == triangle(3, 4, 1)
    assert params.cu_seqlens_q.tolist() == [0, 3, 7]
    assert padding.dtype == torch.bool and padding.tolist() == [[bool(x) for x in PADDING]]


def test_a_middle_stage_plans_the_same_for_its_routers() -> None:
    launch = launch_of(8)
    stream = dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids"))
    *absent, _, padding = scheduled(launch, stream, PADDING)
    assert absent == [None] * 5
    assert padding.tolist() == [[bool(x) for x in PADDING]] and launch.stats.num_plans == 1
    (packed,) = launch._recent.values()
    assert packed.token_plan.mask.area() == triangle(3, 4, 1)


def test_a_scheduled_batch_outside_a_schedule_is_megatrons() -> None:
    launch = launch_of(8)
    launch.sequences = None
    hooked = replace_scheduled_batch(lambda *args, **kwargs: (args, kwargs), launch)
    assert hooked("rows", 3, pg_collection="groups", vpp_size=2) == (
        ("rows", 3),
        {"pg_collection": "groups", "vpp_size": 2},
    )
