"""Models, weights, documents and damages of training runs with layers that carry a state."""

from __future__ import annotations

import dataclasses
import zlib
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor

from megatron_magi.adapter import layer_spec
from megatron_magi.adapter.hybrid_spec import hybrid_local_spec
from megatron_magi.adapter.packed import MagiPackedSeqParams
from megatron_magi.adapter.rank_batch import Batch
from megatron_magi.adapter.state_layers import sign_of
from megatron_magi.adapter.stream_view import ROWS, StreamRows, stream_view

Microbatch = tuple[Batch, list[int]]

SPREADS = {"A_log": (0.0, 1.5), "dt_bias": (-2.0, 0.5), "D": (0.2, 1.0)}
"""Ranges of parameters of one number a head; all others are drawn around 0."""


def new_hybrid_model(layout: Any, settings: dict[str, Any]) -> torch.nn.Module:
    """The pattern's layers; of two pipeline stages of the default one has no attention."""
    spec: Any = hybrid_local_spec
    if layout.attention == "magi":
        spec = layer_spec.with_magi_attention(spec)
    return HybridModel(
        hybrid_stack_spec=spec,
        hybrid_layer_pattern=layout.pattern or ("*-*|E" if layout.pp == 2 else "*-*E"),
        **settings,
    )


@torch.no_grad()
def set_state_weights(models: list[torch.nn.Module]) -> None:
    """Draw the weights of layers with state by layer, name and section, and take this rank's share.

    The linear layers and convolutions join sections that are each split over tensor-parallel ranks.
    """
    for _, module in (found for model in models for found in model.named_modules()):
        if sign_of(module) is None:
            continue
        for name, param in module.named_parameters():
            if getattr(param, "tensor_model_parallel", False) and name != "out_proj.weight":
                sections = _sections(module, name, len(param))
                key = f"{module.layer_number}.{name}"
                parts = [_part(f"{key}.{i}", n, param) for i, n in enumerate(sections)]
                param.copy_(torch.cat(parts))


def _sections(module: Any, name: str, length: int) -> list[int]:
    if name not in ("in_proj.weight", "conv1d_weight", "conv1d_bias", "conv1d.weight"):
        return [length]
    if sign_of(module) == "G":
        qk, v, heads = module.qk_dim_local_tp, module.v_dim_local_tp, module.num_v_heads_local_tp
        return [qk, qk, v, v, heads, heads] if "in_proj" in name else [qk, qk, v]
    inner, state = module.d_inner_local_tp, module.ngroups_local_tp * module.d_state
    conv = [inner, state, state]
    return [inner, *conv, module.nheads_local_tp] if "in_proj" in name else conv


def _part(key: str, length: int, param: Tensor) -> Tensor:
    """This tensor-parallel rank's share of a section of `length` rows a rank."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    full = torch.empty(size * length, *param.shape[1:])
    low, high = SPREADS.get(key.split(".")[1], (-0.3, 0.3))
    return full.uniform_(low, high, generator=generator).chunk(size)[rank]


def documents_alone(given: list[Microbatch]) -> list[Microbatch]:
    """Every document as a microbatch."""
    alone = []
    for batch, bounds in given:
        for begin, end in pairwise(bounds):
            rows = {name: x[:, begin:end] for name, x in vars(batch).items() if x is not None}
            alone.append((dataclasses.replace(batch, **rows), [0, end - begin]))
    return alone


def move_a_boundary(packed: MagiPackedSeqParams) -> None:
    """For the layers with state alone."""
    assert packed.document_bounds is not None
    packed.document_bounds = packed.document_bounds + (np.arange(len(packed.document_bounds)) == 1)


def join_documents(packed: MagiPackedSeqParams) -> None:
    """A state that runs across documents."""
    assert packed.document_bounds is not None
    packed.document_bounds = packed.document_bounds[[0, -1]]


def restart_at_rank_borders(packed: MagiPackedSeqParams) -> None:
    """A state and a convolution that start anew wherever the next row is on another rank."""
    assert packed.document_bounds is not None
    layout = packed.token_plan.layout
    owners = np.repeat(layout.chunk_ranks, layout.chunk_size)
    borders = np.flatnonzero(np.diff(owners)) + 1
    packed.document_bounds = np.union1d(packed.document_bounds, borders)


def order_of_zigzag(packed: MagiPackedSeqParams) -> None:
    """The order in which Megatron's own context parallelism has the rows."""
    view = stream_view(packed)
    cp_size = packed.token_plan.cp_size
    chunks = torch.arange(len(view.rows.rank_order)).chunk(2 * cp_size)
    owned = [(chunks[rank], chunks[-1 - rank]) for rank in range(cp_size)]
    rank_order = torch.cat([chunk for pair in owned for chunk in pair])
    view.rows = StreamRows(rank_order.argsort(), rank_order)
    setattr(view.cu_seqlens_q, ROWS, view.rows)
