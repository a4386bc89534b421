"""Attention inside Megatron's CUDA graphs: whole sequences, stock batches.

A graph takes tensors alone, so no plan can come with a microbatch. Megatron's batch then stays as
it is, cut into mirrored pieces under context parallelism, as layers with state expect them, and
MagiCoreAttention makes the one plan that every microbatch has: each sequence is causal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_magi.adapter.graphs import (
    PARTS_WITHOUT_ATTENTION,
    captures_attention,
    graph_implementation,
    graph_names,
)
from megatron_magi.adapter.max_logit import SETTINGS as OF_MAX_LOGITS
from megatron_magi.config import MagiConfig
from megatron_magi.launcher.documents import OF_DOCUMENTS
from megatron_magi.launcher.session import LauncherState, hook

OTHERS = {
    **dict.fromkeys(OF_DOCUMENTS, "documents change from one microbatch to the next"),
    **dict.fromkeys(OF_MAX_LOGITS, "a replay hands out no logits"),
}
"""Megatron's arguments that a captured attention cannot follow, with the reason."""


def refuse_captured_attention(args: Any, magi: MagiConfig, mask_name: str | None) -> Iterator[str]:
    """One line for everything that does not go with graphs that hold attention."""
    if not captures_attention(args):
        return
    found = [(f"--{name.replace('_', '-')}", why) for name, why in OTHERS.items()
             if getattr(args, name, False)]  # fmt: skip
    pieces = 2 * args.context_parallel_size
    length = args.seq_length or args.encoder_seq_length or 0  # 0: Megatron asks for one
    if pieces > 2 and length % pieces:
        why = f"Megatron cuts a sequence into {pieces} equal pieces"
        found.append((f"--seq-length {length}", why))
    if pieces > 2 and graph_implementation(args) == "full_iteration":
        size = f"--context-parallel-size {args.context_parallel_size}"
        found.append((size, "Megatron cuts a batch before it copies it into such a graph"))
    if pieces > 2 and magi.transport == "symm_mem":
        found.append(("--magi-transport symm_mem", "all_to_all alone can be captured"))
    if _loses_yarn(args):
        why = "Megatron hands YaRN's angles to none of these graphs"
        found.append(("--position-embedding-type yarn", why))
    if mask_name is not None:
        found.append(("--magi-mask", "its function runs for every microbatch"))
    for flag, why in found:
        yield (
            f"{flag} with --attention-backend magi requires CUDA graphs without attention, got "
            f"{graph_names(args)} (--cuda-graph-impl): {why}; set none, or transformer_engine with "
            f"parts of {' '.join(PARTS_WITHOUT_ATTENTION)}"
        )


def _loses_yarn(args: Any) -> bool:
    """Megatron captures TransformerEngine's graphs of such layers without positions, and a replay
    drops the angles that it gets. MLA layers make their own."""
    is_yarn = getattr(args, "position_embedding_type", None) == "yarn"
    of_te = graph_implementation(args) == "transformer_engine"
    return is_yarn and of_te and not getattr(args, "multi_latent_attention", False)


def require_whole_sequences(packed_seq_params: Any) -> None:
    """Raise ValueError for a microbatch with documents, which captured attention would ignore."""
    if packed_seq_params is not None:
        raise ValueError(
            f"CUDA graphs that hold attention require microbatches of whole sequences, got "
            f"{type(packed_seq_params).__name__}; set --cuda-graph-impl none, or unpack the data"
        )


@hook
def wrap_static_inputs(
    launch: LauncherState, original: Any, self: Any, *args: Any, **kwargs: Any
) -> Any:
    """For `TransformerLayer.get_layer_static_inputs`: a graph without the dense mask, one byte for
    every pair of positions, which the plan replaces."""
    inputs = original(self, *args, **kwargs)
    inputs.pop("attention_mask", None)
    return inputs


@hook
def wrap_replay_arguments(
    launch: LauncherState, original: Any, self: Any, *args: Any, **kwargs: Any
) -> Any:
    """For `TransformerLayer._get_te_cuda_graph_replay_args`, which would make a mask of zeros."""
    kwargs.pop("attention_mask", None)
    return original(self, *args, **kwargs)
