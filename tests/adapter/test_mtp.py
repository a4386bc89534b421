"""Multi-token prediction: every layout trains like stock Megatron on one process.

Losses, gradient norms and the logged losses of every depth, two optimizer steps, fp32. The
yardstick runs Megatron's DotProductAttention with a dense mask and Megatron's own `roll_tensor`
and loss code; the roll gets the documents through Megatron's own packed path.
"""

from __future__ import annotations

from typing import Any

import pytest
from megatron.core.transformer import multi_token_prediction

from megatron_magi.adapter import MEGATRON_VERSION
from tests.adapter.layout_cases import (
    ADAM_EPS,
    RELATIVE,
    Case,
    differences,
    run_asked_cases,
    values,
)

RECOMPUTES = MEGATRON_VERSION >= (0, 19)
"""Before, these layers cannot be recomputed with packed tokens."""


def case(id: str, **layout: Any) -> Case:
    return Case(id, {"mtp": 2, "adam_eps": ADAM_EPS, **layout})


REGULAR = [
    case(f"{kind}-{name}", packed=kind == "packed", **layout)
    for kind in ("packed", "one")
    for name, layout in {"one-process": {}, "cp2-pp2": {"cp": 2, "pp": 2}}.items()
]
FEATURE = [
    case("one-depth-cp2", mtp=1, cp=2),
    case("tp2-sp-cp2", tp=2, sp=True, cp=2),
    case("dp2-cp2-distributed-optimizer", dp=2, cp=2, distributed_optimizer=True),
    case("cp2-pp2-vpp2-tied", cp=2, pp=2, vpp=2, tied=True),
    case("window-and-full-layers-cp2", cp=2, packed=False, window=[11, 0], window_skip=2),
    case("mean-loss-one-process", per_token_loss=False),
]
CORNER = [
    case("cp3-odd-length", cp=3, seq_length=89),
    case("cp4-padded", cp=4, seq_length=90),
    case("cp2-one-row-chunks", cp=2, chunk_size=1),
    case("cp2-padded-without-loss-mask", cp=2, seq_length=91, loss_mask_to_model=False),
]
RECOMPUTED = case("cp2-recompute-full", cp=2, recompute="full")
MIXED = case("hidden-state-mixing-one-process", mtp_hsm=True)
HAS_MIXING = hasattr(multi_token_prediction, "_mix_hidden_state_history")
CASES = [
    *(REGULAR + FEATURE + CORNER),
    *([RECOMPUTED] if RECOMPUTES else []),
    *([MIXED] if HAS_MIXING else []),
]
STOCK_ROLL = case("stock-roll", cp=2, packed=False, stock_mtp="roll")
STOCK_COUNTS = case("stock-counts", cp=2, stock_mtp="counts")
WRONG = [STOCK_ROLL, STOCK_COUNTS]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, run_jobs: Any) -> Any:
    return run_asked_cases(request, run_jobs)


@pytest.mark.parametrize("wanted", CASES, ids=lambda c: c.id)
def test_trains_like_stock_cp1(results: dict[str, Any], wanted: Case) -> None:
    stock = values(results, wanted.baseline())
    found = differences(values(results, wanted), stock)
    assert max(found.values()) < RELATIVE, found


@pytest.mark.parametrize("wanted", WRONG, ids=lambda c: c.id)
def test_stock_parts_left_in_place_are_noticed(results: dict[str, Any], wanted: Case) -> None:
    stock = values(results, wanted.baseline())
    found = differences(values(results, wanted), stock)
    assert found["grad_norm"] > 20 * RELATIVE, found


@pytest.mark.skipif(RECOMPUTES, reason="this megatron-core recomputes with packed tokens")
@pytest.mark.parametrize("wanted", [RECOMPUTED], ids=lambda c: c.id)
def test_recomputation_that_stock_cannot_do(results: dict[str, Any], wanted: Case) -> None:
    error = results[wanted.id]["error"]
    assert error.count("got recompute_granularity='full' on an older one; set 'selective'") == 2
