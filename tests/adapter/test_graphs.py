"""Megatron's CUDA graphs may hold a layer's other parts, and attention over whole sequences."""

from __future__ import annotations

import re
from typing import Any

import pytest

from megatron_magi.config import MagiConfig
from megatron_magi.launcher.constraints import refusals, refuse_arguments
from tests.launcher.few_arguments import arguments

SYMM_MEM = MagiConfig(transport="symm_mem")
CP1, CP2 = {"context_parallel_size": 1}, {"context_parallel_size": 2}


@pytest.mark.parametrize(
    "given",
    [
        {"cuda_graph_impl": "none"},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["moe_router"]},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "mlp"},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "moe_router,mlp"},
        {"cuda_graph_impl": "none", "cuda_graph_scope": ["full_iteration_inference"]},
        {
            "cuda_graph_impl": "transformer_engine",
            "cuda_graph_modules": [],
            "cuda_graph_scope_deprecated": ["moe_router", "moe_preprocess"],
        },
    ],
)
def test_graphs_without_attention_are_taken(given: dict[str, Any]) -> None:
    refuse_arguments(arguments(**CP2, **given), mask_name="video_mask:frames")


HOLDING = {
    "transformer_engine over whole layers": {"cuda_graph_impl": "transformer_engine"},
    "full_iteration over whole layers": {"cuda_graph_impl": "full_iteration"},
    "transformer_engine over attn moe_router": {
        "cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn", "moe_router"]
    },
    "full_iteration over full_iteration": {
        "cuda_graph_impl": "none", "cuda_graph_scope_deprecated": ["full_iteration"]
    },
    "local over moe_router": {"cuda_graph_impl": "local", "cuda_graph_scope": ["moe_router"]},
}  # fmt: skip
"""By the words that an error has for them."""


@pytest.mark.parametrize("got", HOLDING)
def test_graphs_that_hold_attention_require_equal_pieces_and_one_transport(got: str) -> None:
    def refused(magi: MagiConfig | None = None, **given: Any) -> str:
        return "\n".join(refusals(arguments(**HOLDING[got], **given), magi, here=False))

    assert not refused(**CP1, seq_length=94) and not refused(SYMM_MEM, **CP1)
    assert bool(refused(**CP2)) == ("full_iteration" in got)
    assert re.search(rf"-seq-length 94 .*got {got} .*into 4 equal", refused(**CP2, seq_length=94))
    assert re.search(rf"-transport symm_mem .*got {got} .*all_to_all al", refused(SYMM_MEM, **CP2))


@pytest.mark.parametrize(
    "name", ["reset_attention_mask", "dataloader_inter_document_masking", "sft", "qk_clip"]
)
def test_graphs_that_hold_attention_require_one_plan(name: str) -> None:
    for got in ("full_iteration over whole layers", "full_iteration over full_iteration"):
        graphs = {**CP1, **HOLDING[got]}
        flag = f"--{name.replace('_', '-')}"
        with pytest.raises(SystemExit, match=f"{flag} with .* requires CUDA gra.* got {got}"):
            refuse_arguments(arguments(**graphs, **{name: True}))
    assert refusals(arguments(**graphs, hybrid_layer_pattern="M*-G*-"), here=False) == []
    with pytest.raises(SystemExit, match=r"--magi-mask with .* every microbatch"):
        refuse_arguments(arguments(**graphs), mask_name="video_mask:frames")


def test_graphs_that_get_no_angles_of_yarn() -> None:
    yarn = {**CP1, "position_embedding_type": "yarn"}
    attn = HOLDING["transformer_engine over attn moe_router"]
    step = HOLDING["full_iteration over whole layers"]
    with pytest.raises(SystemExit, match=r"--position-embedding-type yarn .* over attn moe_router"):
        refuse_arguments(arguments(**yarn, **attn))
    refuse_arguments(arguments(**yarn, **step))
    refuse_arguments(
        arguments(**yarn, cuda_graph_impl="transformer_engine", cuda_graph_scope="mlp")
    )
