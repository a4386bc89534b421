"""Every parallel layout trains like context parallelism 1 with Megatron's own dense attention.

Losses and gradient norms of two optimizer steps, fp32, packed documents of uneven lengths with
masked labels. The yardstick runs DotProductAttention with a dense mask, torch's norms and stock
RoPE: no code of this package inside the model.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.adapter.layout_cases import RELATIVE, Case, differences, run_asked_cases, values


def case(id: str, **layout: Any) -> Case:
    return Case(id, layout)


RECOMPUTED = case("cp2-recompute-full", cp=2, recompute="full")
REGULAR = [
    case("one-process"),
    case("tp2", tp=2),
    case("tp2-sp", tp=2, sp=True),
    case("pp2", pp=2),
    case("pp2-vpp2", pp=2, vpp=2),
    case("cp2", cp=2),
    case("cp4", cp=4),
    case("dp2", dp=2),
    case("dp2-cp2", dp=2, cp=2),
    case("cp2-pp2", cp=2, pp=2),
    case("cp2-pp2-vpp2", cp=2, pp=2, vpp=2),
    case("cp2-pp4", cp=2, pp=4),
    case("tp2-sp-cp2", tp=2, sp=True, cp=2),
    case("tp2-sp-pp2-cp2", tp=2, sp=True, pp=2, cp=2),
]
FEATURE = [
    case("dp2-distributed-optimizer", dp=2, distributed_optimizer=True),
    case("dp2-cp2-overlap", dp=2, cp=2, overlap=True),
    case("dp2-cp2-distributed-optimizer", dp=2, cp=2, distributed_optimizer=True, overlap=True),
    RECOMPUTED,
    case("cp2-recompute-core-attn", cp=2, recompute="core_attn"),
    case("cp2-stages2", cp=2, overlap_degree=2),
    case("cp2-stream-positions", cp=2, restart_positions=False),
    case("cp2-pp2-tied-embeddings", cp=2, pp=2, tied=True),
    case("moe-cp2", cp=2, experts=4),
    case("moe-ep2-cp2", cp=2, ep=2, experts=4),
    case("moe-ep2-cp2-dp2", cp=2, ep=2, dp=2, experts=4),
    case("moe-tp2-sp-ep2-cp2", tp=2, sp=True, ep=2, cp=2, experts=4),
    case("window-cp2", cp=2, packed=False, window=[11, 0]),
    case("window-and-full-layers-cp2-pp2", cp=2, pp=2, packed=False, window=[11, 0], window_skip=2),
]
CORNER = [
    case("cp3-odd-length", cp=3, seq_length=89),
    case("cp4-padded", cp=4, seq_length=90),
    case("tp2-sp-pp2-cp2-padded", tp=2, sp=True, pp=2, cp=2, seq_length=91),
    case("tp4-more-than-kv-heads", tp=4),
    case("cp2-one-row-chunks", cp=2, chunk_size=1),
]
AGAIN = case("cp2-recompute-full-again", cp=2, recompute="full")
CASES = REGULAR + FEATURE + CORNER

WRONG = [
    case("moved-boundary", cp=2, moved_boundary=True),
    case("loss-per-rank", cp=2, per_token_loss=False),
    case("masks-differ", cp=2, moved_boundary_rank=1),
    case("vpp2-batched-p2p", pp=2, vpp=2, batched_p2p=True),
    case("stages-differ", pp=2, moved_boundary_rank=1),
    case("tensor-ranks-differ", tp=2, moved_boundary_rank=1),
]
BF16 = [
    case("bf16-cp2", cp=2, bf16=True),
    case("bf16-cp2-distributed-optimizer", cp=2, bf16=True, distributed_optimizer=True),
]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, run_jobs: Any) -> Any:
    return run_asked_cases(request, run_jobs)


def difference(results: dict[str, Any], wanted: Case) -> float:
    """The largest one to stock attention on one process, of losses and gradient norms."""
    stock = values(results, wanted.baseline())
    return max(differences(values(results, wanted), stock).values())


@pytest.mark.parametrize("wanted", CASES, ids=lambda c: c.id)
def test_layout_trains_like_stock_cp1(results: dict[str, Any], wanted: Case) -> None:
    assert difference(results, wanted) < RELATIVE


@pytest.mark.parametrize(("wanted", "first"), [(AGAIN, RECOMPUTED)], ids=lambda c: c.id)
def test_two_runs_are_equal_bit_for_bit(results: dict[str, Any], wanted: Case, first: Case) -> None:
    assert values(results, wanted) == values(results, first)


@pytest.mark.parametrize("wanted", BF16, ids=lambda c: c.id)
def test_bf16_trains_like_stock_bf16(results: dict[str, Any], wanted: Case) -> None:
    assert difference(results, wanted) < 1e-2


@pytest.mark.parametrize("wanted", WRONG[:1], ids=lambda c: c.id)
def test_moved_document_boundary_is_caught(results: dict[str, Any], wanted: Case) -> None:
    assert difference(results, wanted) > 20 * RELATIVE


@pytest.mark.parametrize("wanted", WRONG[1:2], ids=lambda c: c.id)
def test_loss_averaged_per_rank_is_refused(results: dict[str, Any], wanted: Case) -> None:
    error = results[wanted.id]["error"]
    assert error.count("context parallelism requires calculate_per_token_loss=True") == 2


@pytest.mark.parametrize("wanted", WRONG[2:3], ids=lambda c: c.id)
def test_ranks_with_different_masks_all_stop(results: dict[str, Any], wanted: Case) -> None:
    result = results[wanted.id]
    assert result["error"].count("AgreementError: context-parallel ranks must plan the same") == 2
    assert "differ from rank 0 in mask" in result["error"]
    assert result["seconds"] < 20


@pytest.mark.parametrize("wanted", WRONG[3:4], ids=lambda c: c.id)
def test_two_stages_with_batched_p2p_are_refused(results: dict[str, Any], wanted: Case) -> None:
    assert "require overlap_p2p_comm=True" in results[wanted.id]["error"]


@pytest.mark.parametrize("wanted", WRONG[4:], ids=lambda c: c.id)
def test_ranks_of_one_model_with_different_masks_stop(
    results: dict[str, Any], wanted: Case
) -> None:
    result = results[wanted.id]
    assert "AgreementError: tensor- and pipeline-parallel ranks must plan" in result["error"]
    assert "differ from rank 0 in mask" in result["error"]
    assert result["seconds"] < 20
