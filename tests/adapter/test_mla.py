"""Multi-latent attention trains in every layout like a dense stand-in on one process.

Megatron's DotProductAttention takes one width of keys and values, so the yardstick's core attention
is `dense_latent.DenseLatentAttention`; projections, norms and rotary embeddings are Megatron's own.
Queries and keys are 24 wide, values 12; losses and gradient norms as in test_layouts.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.adapter.layout_cases import RELATIVE, Case
from tests.adapter.test_layouts import case, difference, results

__all__ = ["results"]

CASES = [
    case(f"mla-{rope}-{name}", latent=rope, **layout)
    for rope in ("rope", "yarn")
    for name, layout in {
        "one-process": {},
        "cp2": {"cp": 2},
        "cp3-odd-length": {"cp": 3, "seq_length": 89},
    }.items()
] + [
    case("mla-pp2", latent="yarn", pp=2),
    case("mla-cp2-pp2", latent="yarn", cp=2, pp=2),
    case("mla-tp2-sp", latent="yarn", tp=2, sp=True),
    case("mla-tp2-sp-cp2", latent="yarn", tp=2, sp=True, cp=2),
    case("mla-cp2-stream-positions", latent="yarn", cp=2, restart_positions=False),
    case("mla-cp2-recompute-full", latent="yarn", cp=2, recompute="full"),
    case("mla-cp2-recompute-core-attn", latent="yarn", cp=2, recompute="core_attn"),
    case("mla-cp2-recompute-up-proj", latent="yarn", cp=2, recompute="mla_up_proj"),
    case("mla-moe-cp2-no-query-rank", latent="rope", cp=2, q_lora_rank=None, experts=4),
    case("mla-cp2-stages2", latent="yarn", cp=2, overlap_degree=2),
    case("mla-dp2-cp2-distributed-optimizer", latent="yarn", dp=2, cp=2,
         distributed_optimizer=True),
]  # fmt: skip
NO_SEQUENCE = case("mla-tp2", latent="yarn", tp=2)
MOVED = case("mla-moved-boundary", latent="yarn", cp=2, moved_boundary=True)


@pytest.mark.parametrize("wanted", CASES, ids=lambda c: c.id)
def test_layout_trains_like_the_dense_stand_in(results: dict[str, Any], wanted: Case) -> None:
    assert difference(results, wanted) < RELATIVE


@pytest.mark.parametrize("wanted", [MOVED], ids=lambda c: c.id)
def test_moved_document_boundary_is_caught(results: dict[str, Any], wanted: Case) -> None:
    assert difference(results, wanted) > 20 * RELATIVE


@pytest.mark.parametrize("wanted", [NO_SEQUENCE], ids=lambda c: c.id)
def test_tensor_without_sequence_parallelism_is_refused(
    results: dict[str, Any], wanted: Case
) -> None:
    text = "tensor_model_parallel_size=2 requires sequence_parallel=True, got False"
    assert results[wanted.id]["error"].count(text) == 2
