"""A model takes the rows that were dispatched by the plan of its forward, and no others."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_magi.adapter.carried_plan import (
    carried_plan,
    carry_plan,
    carry_selected,
    check_rows,
)
from megatron_magi.adapter.packed import MagiPackedSeqParams, make_packed_seq_params
from megatron_magi.adapter.rank_batch import Batch, dispatch_batch
from megatron_magi.config import MagiConfig
from megatron_magi.core.mask import AttnMask, builders
from megatron_magi.launcher.flags import LauncherOptions
from megatron_magi.launcher.model_hooks import _give_plan
from megatron_magi.launcher.session import LauncherState

LENGTH = 8


class Chunk(torch.nn.Module):
    """The forward of a GPTModel, as far as its rows go."""

    def __init__(self, pre_process: bool = True, post_process: bool = True) -> None:
        super().__init__()
        self.pre_process, self.post_process = pre_process, post_process

    def forward(
        self,
        input_ids: Any,
        position_ids: Any,
        attention_mask: Any,
        decoder_input: Any = None,
        labels: Any = None,
        loss_mask: Any = None,
        packed_seq_params: Any = None,
    ) -> dict[str, Any]:
        return {"packed_seq_params": packed_seq_params, "attention_mask": attention_mask}


def plan(length: int = LENGTH, *cuts: int, **more: Any) -> MagiPackedSeqParams:
    """Of a stream that is cut into documents at these tokens."""
    from megatron.core.transformer import TransformerConfig

    mask = more.pop("mask", "causal")
    model = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, **more)
    return make_packed_seq_params([0, *cuts, length], model, None, mask=mask, device="cpu")


def rows(packed: MagiPackedSeqParams, length: int = LENGTH) -> Batch:
    tokens = torch.arange(length)[None]
    batch = dispatch_batch(Batch(tokens, tokens + 1), packed, None).batch
    assert batch is not None
    return batch


def forward(chunk: Chunk, packed: Any, **given: Any) -> dict[str, Any]:
    chunk.register_forward_pre_hook(check_rows, with_kwargs=True)
    usual = {"input_ids": None, "position_ids": None, "attention_mask": None}
    return chunk(**{**usual, **given}, packed_seq_params=packed)


def test_dispatched_rows_carry_their_plan() -> None:
    packed = plan()
    batch = rows(packed)
    assert carried_plan(batch.tokens) is carried_plan(batch.labels) is packed
    assert carried_plan(torch.zeros(1)) is None and carried_plan(None) is None


def test_rows_of_the_plan_are_taken() -> None:
    packed = plan()
    batch = rows(packed)
    forward(Chunk(), packed, input_ids=batch.tokens, labels=batch.labels)


def test_rows_of_an_equal_plan_are_taken() -> None:
    """A batch may be planned once more, e.g. on another stage."""
    batch, packed = rows(plan()), plan()
    assert carried_plan(batch.tokens) is not packed
    forward(Chunk(), packed, input_ids=batch.tokens, labels=batch.labels)


@pytest.mark.parametrize("name", ["input_ids", "decoder_input", "labels"])
@pytest.mark.parametrize(
    ("given", "got"),
    [
        (lambda: torch.zeros(1, 8), "rows without a plan of shape (1, 8)"),
        (lambda: rows(plan(), 8).tokens + 0, "rows without a plan of shape (1, 8)"),
        (lambda: rows(plan(16), 16).tokens, "rows of another plan of shape (1, 16)"),
        (lambda: rows(plan(LENGTH, 3)).tokens, "rows of another plan of shape (1, 8)"),
        (lambda: rows(plan(mask="full")).tokens, "rows of another plan of shape (1, 8)"),
    ],
    ids=["never dispatched", "made from dispatched ones", "length", "documents", "mask"],
)
def test_other_rows_are_refused(name: str, given: Any, got: str) -> None:
    text = f"{name} must be rows that dispatch_batch gave for the packed_seq_params of this forward"
    with pytest.raises(ValueError, match=re.escape(f"{text}, got {got}; dispatch the batch by")):
        forward(Chunk(), plan(), **{name: given()})


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda: plan(LENGTH, 3), lambda: plan(LENGTH, 4)),
        (lambda: plan(LENGTH, 3), lambda: plan(LENGTH, 3, 5)),
        (lambda: plan(window_size=(2, 0)), lambda: plan(window_size=(3, 0))),
        (
            lambda: plan(LENGTH, 3, mask=all_of_it()),  # positions alone differ
            lambda: plan(LENGTH, 4, mask=all_of_it()),
        ),
    ],
    ids=["a moved boundary", "one more boundary", "windows", "positions"],
)
@pytest.mark.parametrize("name", ["tokens", "labels", "position_ids", "loss_mask"])
def test_rows_of_another_microbatch_are_refused(ours: Any, theirs: Any, name: str) -> None:
    """All of these have one token layout."""
    mine, other = ours(), theirs()
    assert mine.token_plan.layout.digest == other.token_plan.layout.digest
    given, wrong = (inputs_of(packed) for packed in (mine, other))
    forward(Chunk(), mine, **given)
    argument = {"tokens": "input_ids"}.get(name, name)
    with pytest.raises(ValueError, match=rf"{argument} must be rows .* got rows of another plan"):
        forward(Chunk(), mine, **{**given, argument: wrong[argument]})


def all_of_it() -> AttnMask:
    return builders.from_cu_seqlens([0, LENGTH], causal=True)


def inputs_of(packed: MagiPackedSeqParams) -> dict[str, Any]:
    """All rows of a batch, as the model takes them."""
    x = torch.arange(LENGTH)[None]
    local = dispatch_batch(Batch(x, x + 1, torch.ones(1, LENGTH), x), packed, None)
    given = local.model_inputs()
    return {name: given[name] for name in ("input_ids", "labels", "position_ids", "loss_mask")}


@pytest.mark.parametrize("name", ["input_ids", "labels", "position_ids", "loss_mask"])
@pytest.mark.parametrize("packed", [None, SimpleNamespace(qkv_format="thd")], ids=["none", "thd"])
def test_rows_of_a_plan_need_it(name: str, packed: Any) -> None:
    """Without it, documents would see each other."""
    dispatched = inputs_of(plan(LENGTH, 3))
    text = rf"{name} are rows that dispatch_batch gave by a plan, .* as packed_seq_params, got"
    with pytest.raises(ValueError, match=text):
        forward(Chunk(), packed, **{name: dispatched[name]})


def test_rows_that_a_caller_marks_are_taken() -> None:
    packed = plan()
    embedded = torch.zeros(LENGTH, 1, 8)
    assert carry_plan(embedded, packed) is embedded
    forward(Chunk(), packed, decoder_input=embedded, labels=rows(packed).labels)


def test_a_plan_is_carried_by_rows() -> None:
    with pytest.raises(TypeError, match="rows must be a Tensor, got None"):
        carry_plan(None, plan())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="packed must be a MagiPackedSeqParams, got None"):
        carry_plan(torch.zeros(1, 8), None)  # type: ignore[arg-type]


def test_stages_check_what_they_read() -> None:
    wrong, packed = torch.zeros(1, 8), plan()
    forward(Chunk(pre_process=False), packed, input_ids=wrong, labels=rows(packed).labels)
    forward(Chunk(post_process=False), packed, input_ids=rows(packed).tokens, labels=wrong)
    forward(Chunk(False, False), packed, input_ids=wrong, labels=wrong)
    with pytest.raises(ValueError, match="labels must be rows"):
        forward(Chunk(pre_process=False), packed, labels=wrong)


def test_forwards_without_our_plan_are_let_alone() -> None:
    for packed in (None, SimpleNamespace(qkv_format="thd")):
        forward(Chunk(), packed, input_ids=torch.zeros(1, 8))


def launched(chunk: Chunk, **given: Tensor | None) -> dict[str, Any]:
    """The forward as the launcher hooks it: its pre-hook gives the plan."""
    launch = LauncherState(LauncherOptions(MagiConfig()))
    usual = {"input_ids": None, "position_ids": None, "attention_mask": torch.ones(1)}
    _, kwargs = _give_plan(launch, chunk, (), {**usual, **given})
    check_rows(chunk, (), kwargs)
    return chunk(**kwargs)


def test_the_launcher_gives_the_plan_that_rows_carry() -> None:
    packed = plan()
    batch = rows(packed)
    for given in ({"input_ids": batch.tokens}, {"labels": batch.labels}):
        seen = launched(Chunk("input_ids" in given, "labels" in given), **given)
        assert seen["packed_seq_params"] is packed and seen["attention_mask"] is None


def test_the_launcher_refuses_rows_without_a_plan() -> None:
    with pytest.raises(
        ValueError, match="takes rows that magi's batch hook dispatched, got tokens"
    ):
        launched(Chunk(), input_ids=torch.zeros(1, 8))
    with pytest.raises(ValueError, match=r"labels must be rows .* got rows of another plan"):
        launched(Chunk(), input_ids=rows(plan()).tokens, labels=rows(plan(16), 16).labels)


def test_rows_that_a_model_selected_itself_carry_the_plan() -> None:
    packed = plan()
    tokens, labels, embedded = (torch.zeros(shape) for shape in ((1, 8), (1, 8), (4, 1, 2)))
    carry_selected({"input_ids": tokens, "labels": labels, "decoder_input": embedded}, packed)
    assert all(carried_plan(x) is packed for x in (tokens, labels, embedded))


def test_another_number_of_selected_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"labels must be the 8 rows .* got shape \(1, 7\)"):
        carry_selected({"labels": torch.zeros(1, 7)}, plan())
