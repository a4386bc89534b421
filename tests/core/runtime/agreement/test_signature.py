"""Calls that differ in anything have other signatures, and the error says in what."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import megatron_magi as magi
from megatron_magi import AttnPlan, HeadShape, MagiConfig, TokenLayout, masks
from megatron_magi.core.runtime.agreement.signature import (
    KINDS,
    SIGNATURE_LEN,
    Call,
    describe_difference,
    differing_ranks,
    plan_part,
    signature_of,
)

PLAN = plan_part(magi.plan(masks.causal(8), 1, HeadShape(2, 1, 4)))


@pytest.mark.parametrize("kind", KINDS)
def test_any_part_of_a_call_makes_another_signature(kind: str) -> None:
    call = Call(kind, (2, 8, 8), torch.bfloat16, 0.25, 1)
    others = [
        Call(KINDS[KINDS.index(kind) - 1], (2, 8, 8), torch.bfloat16, 0.25, 1),
        Call(kind, (2, 8), torch.bfloat16, 0.25, 1),
        Call(kind, (2, 8, 8, 0), torch.bfloat16, 0.25, 1),
        Call(kind, (0, 2, 8, 8), torch.bfloat16, 0.25, 1),
        Call(kind, (1 << 20, 8, 8), torch.bfloat16, 0.25, 1),
        Call(kind, (2, 8, 8, 1, 1), torch.bfloat16, 0.25, 1),
        Call(kind, (2, 8, 8), torch.float16, 0.25, 1),
        Call(kind, (2, 8, 8), torch.bfloat16, 0.25 + 2**-50, 1),
        Call(kind, (2, 8, 8), torch.bfloat16, 0.25, -1),
        Call(kind, (2, 8, 8), torch.bfloat16, 0.25, 1, 30.0),
        Call(kind, (2, 8, 8), torch.bfloat16, 0.25, 0, 30.0),
        Call(kind, (2, 8, 8), torch.bfloat16, 0.25, 1, 30.000001),
    ]
    signatures = [signature_of(c, PLAN, 7) for c in (call, *others)]
    assert all(len(signature) == SIGNATURE_LEN for signature in signatures)
    assert len({*signatures, signature_of(call, PLAN, 8)}) == len(others) + 2
    for other in signatures[1:]:
        said = describe_difference(np.array([signatures[0], signatures[0], other]), "ranks", 1)
        assert "[2]" in said or "on rank 2" in said


def test_rows_of_four_dimensions_are_shown() -> None:
    """And of more are compared, though not shown."""
    shapes = [(2, 3, 4, 5), (2, 3, 4, 6)], [(1, 2, 3, 4, 5), (1, 2, 3, 4, 6)]
    said = []
    for pair in shapes:
        signatures = [signature_of(Call("undispatch", s, torch.float32), PLAN, 0) for s in pair]
        said.append(describe_difference(np.array(signatures), "ranks", 1))
    assert "row [2, 3, 4, 5], torch.float32" in said[0] and "row [2, 3, 4, 6]" in said[0]
    assert said[1]


def test_a_scale_of_minus_zero_is_zero() -> None:
    """Whichever of the two a rank has seen first, which it remembers for both."""
    of_zeros = [signature_of(Call("shift_tokens", scale=x), PLAN, 0) for x in (-0.0, 0.0)]
    assert of_zeros[0] == of_zeros[1] and of_zeros[0][6] == 0


def test_every_size_of_a_row_counts() -> None:
    """Beyond 16 bits of a dimension too, where its packed form would repeat."""
    shapes = [(size, 64) for size in (1, 1 + 2**16, 1 + 2**17)]
    assert len({signature_of(Call("undispatch", shape), PLAN, 0) for shape in shapes}) == len(
        shapes
    )


def test_a_sum_of_gradients_is_not_meant_unless_said() -> None:
    calls = Call("undispatch", (4,)), Call("undispatch", (4,), extra=1)
    said = describe_difference(np.array([signature_of(c, PLAN, 0) for c in calls]), "ranks", 0)
    assert said.index("is_partial_grad False") < said.index("is_partial_grad True")


def plan_of(length: int = 64, heads: int = 2, is_deterministic: bool = False) -> AttnPlan:
    config = MagiConfig(deterministic=is_deterministic, chunk_size=8)
    return magi.plan(masks.causal(length), 2, HeadShape(heads, 1, 4), config)


@pytest.mark.parametrize(
    "other, fields",
    [
        (plan_of(length=63), "mask, token layout"),
        (plan_of(heads=4), "head_shape"),
        (plan_of(is_deterministic=True), "config"),
    ],
    ids=["mask", "heads", "config"],
)
def test_the_input_in_which_plans_differ_is_named(other: AttnPlan, fields: str) -> None:
    parts = [plan_part(plan) for plan in (plan_of(), plan_of(), other, other)]
    signatures = np.array([signature_of(Call("plan"), part, 3) for part in parts])
    assert differing_ranks(signatures) == [2, 3]
    said = describe_difference(signatures, "ranks", 1)
    assert f"ranks [2, 3] differ from rank 0 in {fields} (plan, call 3 of this group" in said


def test_a_layout_of_keys_is_a_token_layout() -> None:
    mask, heads = masks.full(64), HeadShape(2, 1, 4)
    layouts = [TokenLayout(64, 32, 2, np.array(x, np.int32)) for x in ([0, 1], [1, 0])]
    plans = [magi.plan(mask, 2, heads, layout=layouts[0], key_layout=x) for x in layouts]
    plans.append(magi.plan(mask, 2, heads, layout=layouts[1], key_layout=layouts[1]))
    signatures = np.array([signature_of(Call("plan"), plan_part(plan), 0) for plan in plans])
    for pair in ([0, 1], [0, 2], [1, 2]):
        said = describe_difference(signatures[pair], "ranks", 0)
        assert "differ from rank 0 in token layout (plan" in said


def test_plans_of_other_planners_differ_in_no_input() -> None:
    signatures = [signature_of(Call("plan"), (digest, PLAN[1]), 0) for digest in (1, 2)]
    said = describe_difference(np.array(signatures), "ranks", 0)
    assert "differ from rank 0 in the planner version" in said


def test_ranks_are_those_of_the_job() -> None:
    signatures = np.array([signature_of(Call("batch", extra=x), PLAN, 0) for x in (1, 2)])
    said = describe_difference(signatures, "ranks", 5, (4, 5))
    assert "ranks [5] hold other tokens" in said
    assert "than rank 4" in said and "seen by rank 5" in said
