"""Tells which parts of a layer Megatron's CUDA graphs hold, and if attention is one of them.

A graph repeats one sequence of kernels on the same memory. Attention over a plan that changes
cannot be repeated so. Attention over whole sequences has one plan, and the other parts of a layer
see rows only, whose number is fixed for a run.
"""

from __future__ import annotations

from typing import Any

PARTS_WITHOUT_ATTENTION = ("moe_router", "moe_preprocess", "mlp")
"""Parts that a graph may hold in every job."""

_NAMES = ("cuda_graph_modules", "cuda_graph_scope", "cuda_graph_scope_deprecated")
"""Where Megatron 0.20, 0.18 and 0.19, and the arguments of 0.20 have them."""


def graph_parts(settings: Any) -> list[str]:
    """Names of the parts that are captured; none stands for the whole layer.

    Args:
        settings: Megatron's arguments or its TransformerConfig.
    """
    given: Any = next((value for name in _NAMES if (value := getattr(settings, name, None))), ())
    parts = given.split(",") if isinstance(given, str) else given
    return [str(getattr(part, "name", part)) for part in parts]


def graph_implementation(settings: Any) -> str:
    """Megatron's implementation. A former scope, full_iteration, chooses the one of that name, also
    where none is given; Megatron's `validate_args` only changes it after our refusals."""
    if "full_iteration" in graph_parts(settings):
        return "full_iteration"
    return getattr(settings, "cuda_graph_impl", None) or "none"


def graph_names(settings: Any) -> str:
    """The implementation and its parts, for an error."""
    names = " ".join(graph_parts(settings)) or "whole layers"
    return f"{graph_implementation(settings)} over {names}"


def captures_attention(settings: Any) -> bool:
    """True if a CUDA graph would hold attention, or another implementation than
    TransformerEngine's makes the graphs, which captures whole layers.

    Args:
        settings: Megatron's arguments or its TransformerConfig.
    """
    implementation = graph_implementation(settings)
    if implementation == "none":
        return False
    parts = graph_parts(settings)
    return implementation != "transformer_engine" or not (
        parts and {*parts} <= {*PARTS_WITHOUT_ATTENTION}
    )
