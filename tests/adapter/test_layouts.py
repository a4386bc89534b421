"""Every parallel layout trains like context parallelism 1 with Megatron's own dense attention.

Losses and gradient norms of two optimizer steps, fp32, packed documents of uneven lengths with
masked labels. The yardstick runs DotProductAttention with a dense mask, torch's norms and stock
RoPE: no code of this package inside the model.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

RELATIVE = 2e-5


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout by its differences from one process, and the worlds it needs."""

    id: str
    layout: dict[str, Any]

    @property
    def world(self) -> int:
        sizes = [self.layout.get(name, 1) for name in ("tp", "pp", "cp", "dp")]
        return sizes[0] * sizes[1] * sizes[2] * sizes[3]

    def baseline(self) -> Case:
        """The same model and data on one process with stock attention."""
        model = ("experts", "tied", "seq_length", "packed", "window", "window_skip", "bf16")
        model += ("latent", "q_lora_rank")
        kept = {name: self.layout[name] for name in model if name in self.layout}
        suffix = "-".join(f"{k}={v}" for k, v in sorted(kept.items()))
        return Case(f"stock {suffix}", {**kept, "attention": "stock"})


def case(id: str, **layout: Any) -> Case:
    return Case(id, layout)


FIRST = case("cp2-pp2-vpp2", cp=2, pp=2, vpp=2)
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
    FIRST,
    case("cp2-pp4", cp=2, pp=4),
    case("tp2-sp-cp2", tp=2, sp=True, cp=2),
    case("tp2-sp-pp2-cp2", tp=2, sp=True, pp=2, cp=2),
]
FEATURE = [
    case("dp2-distributed-optimizer", dp=2, distributed_optimizer=True),
    case("dp2-cp2-overlap", dp=2, cp=2, overlap=True),
    case("dp2-cp2-distributed-optimizer", dp=2, cp=2, distributed_optimizer=True, overlap=True),
    case("cp2-recompute-full", cp=2, recompute="full"),
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
AGAIN = case("cp2-pp2-vpp2-again", cp=2, pp=2, vpp=2)
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
    """Results of all cases the selected tests ask for, from one worker process."""
    wanted: dict[str, Case] = {}
    for item in request.session.items:
        params = getattr(item, "callspec", None)
        if item.fspath == request.node.path and params and "wanted" in params.params:
            asked: Case = params.params["wanted"]
            for needed in (asked.baseline(), asked, *([FIRST] if asked is AGAIN else [])):
                wanted[needed.id] = needed
    return run_jobs(
        [
            {
                "name": c.id,
                "function": "train",
                "kwargs": {"name": c.id, **c.layout},
                "world": c.world,
            }
            for c in wanted.values()
        ]
    )


def values(results: dict[str, Any], case: Case) -> dict[str, list[float]]:
    result = results[case.id]
    assert "error" not in result, result["error"]
    first: dict[str, list[float]] = result["values"][0]
    assert all(difference(other, first) < 1e-6 for other in result["values"]), result["values"]
    return first


def difference(got: dict[str, list[float]], wanted: dict[str, list[float]]) -> float:
    """Largest relative difference over steps, of losses and gradient norms."""
    pairs = [p for key in ("loss", "grad_norm") for p in zip(got[key], wanted[key], strict=True)]
    assert len(pairs) == 4
    return max(abs(a - b) / abs(b) for a, b in pairs)


@pytest.mark.parametrize("wanted", CASES, ids=lambda c: c.id)
def test_layout_trains_like_stock_cp1(results: dict[str, Any], wanted: Case) -> None:
    stock = values(results, wanted.baseline())
    assert difference(values(results, wanted), stock) < RELATIVE


@pytest.mark.parametrize("wanted", [AGAIN], ids=lambda c: c.id)
def test_two_runs_are_equal_bit_for_bit(results: dict[str, Any], wanted: Case) -> None:
    assert values(results, wanted) == values(results, FIRST)


@pytest.mark.parametrize("wanted", BF16, ids=lambda c: c.id)
def test_bf16_trains_like_stock_bf16(results: dict[str, Any], wanted: Case) -> None:
    stock = values(results, wanted.baseline())
    assert difference(values(results, wanted), stock) < 1e-2


@pytest.mark.parametrize("wanted", WRONG[:1], ids=lambda c: c.id)
def test_moved_document_boundary_is_caught(results: dict[str, Any], wanted: Case) -> None:
    stock = values(results, wanted.baseline())
    assert difference(values(results, wanted), stock) > 20 * RELATIVE


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
