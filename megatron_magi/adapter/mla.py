"""Multi-latent attention (MLA): Megatron's layers for it, on rows in the plan's order.

Such a layer handles packed tokens by itself and differs from a plain layer in two ways. First,
whenever it gets packed_seq_params it drops the batch dimension of its projections, which only its
thd path restores. Second, it owns the rotary embedding, RoPE or YaRN, which gives a rank the angles
of two mirrored pieces of the sequence. Therefore the projections of a prepared layer get plain
[rows, 1, hidden] rows without packed_seq_params, the rotary embedding gives the angles of the rows'
positions, and the core attention gets the plan as in other layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from torch import Tensor

from megatron_magi.adapter.packed import MagiPackedSeqParams
from megatron_magi.adapter.rope import RowPositions, YarnRowPositions, following_rows


class MlaRotaryEmbedding(RowPositions, RotaryEmbedding):  # type: ignore[misc]
    """A layer's RoPE at the positions of its rows."""


class MlaYarnRotaryEmbedding(YarnRowPositions, YarnRotaryEmbedding):  # type: ignore[misc]
    """A layer's YaRN at the positions of its rows."""


ROTARY_OF: dict[type, Any] = {
    RotaryEmbedding: MlaRotaryEmbedding,
    YarnRotaryEmbedding: MlaYarnRotaryEmbedding,
}


def prepare_mla_layers(chunk: torch.nn.Module) -> None:
    """Let every MLA layer of a model chunk take magi's batches; a prepared one stays as it is.

    Raises:
        NotImplementedError: a setting or rotary embedding that cannot follow the plan.
    """
    for layer in chunk.modules():
        is_mla = isinstance(layer, MultiLatentAttention)
        if is_mla and not isinstance(layer.rotary_pos_emb, RowPositions):
            _prepare(layer)


def rotary_by_row(stock: Any) -> Any:
    """An embedding with the same frequencies and scaling that follows given positions; ``stock``
    itself if it is magi's.

    Raises:
        NotImplementedError: a rotary embedding that is neither RoPE nor YaRN.
    """
    return following_rows(
        stock, ROTARY_OF, "multi-latent attention requires rope_type 'rope' or 'yarn'"
    )


def _prepare(layer: Any) -> None:
    _check_config(layer.config)
    layer.rotary_pos_emb = rotary_by_row(layer.rotary_pos_emb)
    project = type(layer).get_query_key_value_tensors
    layer.get_query_key_value_tensors = functools.partial(_project_rows, project, layer)
    down = getattr(layer, "linear_kv_down_proj", None)
    columns = layer.config.kv_lora_rank + layer.config.qk_pos_emb_head_dim
    if down is not None and down.weight.shape[0] < columns:
        down.register_forward_hook(functools.partial(_gather_latent, layer.tp_group))


def _check_config(config: Any) -> None:
    if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        # All heads share the rotary part of a key, but Megatron counts the gradient of a rank's own
        # heads only. It counts the gradient of the query's norm once for every rank.
        raise NotImplementedError(
            f"multi-latent attention with tensor_model_parallel_size="
            f"{config.tensor_model_parallel_size} requires sequence_parallel=True, got False: "
            f"Megatron's gradients differ from those of one process; set it so"
        )


def _project_rows(
    project: Callable[..., Any],
    layer: Any,
    hidden_states: Tensor,
    key_value_states: Tensor | None = None,
    position_ids: Tensor | None = None,
    packed_seq_params: Any = None,
    **rest: Any,
) -> Any:
    """Megatron's projections, [rows, 1, heads, head_dim] each, of rows at the plan's positions.

    Positions are set from each call's own microbatch, so recomputed layers get the right ones.
    """
    is_ours = isinstance(packed_seq_params, MagiPackedSeqParams)
    layer.rotary_pos_emb.positions = packed_seq_params.rope_positions if is_ours else None
    packed = None if is_ours else packed_seq_params
    return project(layer, hidden_states, key_value_states, position_ids, packed, **rest)


def _gather_latent(
    group: dist.ProcessGroup, down: Any, inputs: Any, output: tuple[Tensor, Any]
) -> tuple[Tensor, Any]:
    """Whole latent rows of this rank's part of the sequence, from a column-parallel projection.

    Every head shares the rotary part of a key, so its gradient is a sum over the heads of all
    tensor-parallel ranks. If Megatron gathers these columns itself, it leaves out the heads of the
    other ranks: there is no error, but the weights become wrong. If rows arrive whole, Megatron
    gathers the sequence and sums the gradient.
    """
    part, bias = output
    whole = gather_from_tensor_model_parallel_region(part, group=group)
    return scatter_to_sequence_parallel_region(whole, group=group), bias
