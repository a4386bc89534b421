"""Megatron's CUDA graphs may hold the parts of a layer beside attention."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_magi.launcher.constraints import refuse_arguments
from tests.launcher.few_arguments import arguments


@pytest.mark.parametrize(
    "given",
    [
        {"cuda_graph_impl": "none"},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["moe_router"]},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "mlp"},
        {
            "cuda_graph_impl": "transformer_engine",
            "cuda_graph_modules": [],
            "cuda_graph_scope_deprecated": ["moe_router", "moe_preprocess"],
        },
    ],
)
def test_graphs_without_attention_are_taken(given: dict[str, Any]) -> None:
    refuse_arguments(arguments(**given))


@pytest.mark.parametrize(
    ("given", "got"),
    [
        ({"cuda_graph_impl": "transformer_engine"}, "transformer_engine over whole layers"),
        ({"cuda_graph_impl": "full_iteration"}, "full_iteration over whole layers"),
        (
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn", "moe_router"]},
            "transformer_engine over attn moe_router",
        ),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": ["moe_router"]}, "local over moe_router"),
    ],
)
def test_graphs_that_hold_attention_are_refused(given: dict[str, Any], got: str) -> None:
    with pytest.raises(SystemExit, match=rf"got {got} \(--cuda-graph-impl\)"):
        refuse_arguments(arguments(**given))
