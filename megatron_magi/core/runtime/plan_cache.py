"""A cache of plans by content, so that layers, stages and repeated masks plan once."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from megatron_magi.checks import integer, is_integer_like
from megatron_magi.config import MagiConfig
from megatron_magi.core.comm.process_group import CpGroup, group_size, mesh_ranks_per_node
from megatron_magi.core.kernel.autograd import one_graph_break
from megatron_magi.core.mask import AttnMask
from megatron_magi.core.plan import AttnPlan, HeadShape, TokenLayout, make_attn_plan
from megatron_magi.core.plan.attn_plan import check_inputs
from megatron_magi.core.plan.layer_plans import make_layer_plans
from megatron_magi.core.plan.token_layout import LayerMasks

CAPACITY = 64
"""Number of plans that stay cached: enough for the microbatches in flight, whose layers and stages
share plans. A plan keeps its tables on the device, 10 to 20 MiB at a million tokens on 8 ranks."""


@lru_cache(maxsize=CAPACITY)
def cached_plan(
    mask: AttnMask,
    cp_size: int,
    head_shape: HeadShape,
    config: MagiConfig,
    layout: TokenLayout | None,
    key_layout: TokenLayout | None,
    token_multiple: int,
) -> AttnPlan:
    """The plan, made or remembered. Threads may share it, so a data loader may plan ahead."""
    return make_attn_plan(
        mask, cp_size, head_shape, config, layout=layout, key_layout=key_layout,
        token_multiple=token_multiple,
    )  # fmt: skip


@one_graph_break
def plan_for(
    mask: AttnMask,
    cp_size: int | CpGroup,
    head_shape: HeadShape,
    config: MagiConfig | None = None,
    *,
    layout: TokenLayout | None = None,
    key_layout: TokenLayout | None = None,
    token_multiple: int = 1,
) -> AttnPlan:
    """The plan of a mask: which rank computes what, and which rows it needs.

    Every rank computes the same plan, without communication.

    Args:
        mask: over one packed sequence; cross-attention has a sequence of keys too.
        cp_size: number of context-parallel ranks, or their group or mesh. A 2-D mesh, [nodes, ranks
            of a node], stands for its number of ranks in ``config.costs.ranks_per_node`` too.
        head_shape: heads and head_dim of one tensor-parallel rank.
        config: None: the defaults.
        layout: the layout of an earlier plan, for a second mask over the same tokens (hybrid
            sliding-window and full layers).
        key_layout: in cross-attention, the layout that the keys have, e.g. of the plan of an
            encoder. None: the planner chooses one, ``plan.key_layout``.
        token_multiple: the tokens per rank are a multiple of it (the tensor-parallel size if
            sequence parallelism splits them).

    Raises:
        ValueError: a mask, config and layout that do not fit together.
    """
    config = MagiConfig() if config is None else config
    check_inputs(mask, head_shape, config, layout, key_layout)
    size, config = _size_and_config(cp_size, config)
    tokens = integer(token_multiple, "token_multiple")
    return cached_plan(mask, size, head_shape, config, layout, key_layout, tokens)


def layer_plans_for(
    layers: LayerMasks,
    cp_size: int | CpGroup,
    head_shape: HeadShape,
    config: MagiConfig,
    *,
    token_multiple: int = 1,
) -> tuple[AttnPlan, ...]:
    """The plans of all masks of a model, made or remembered; see `make_layer_plans`.

    Args:
        cp_size: as in `plan_for`.
    """
    for mask, _ in layers:
        check_inputs(mask, head_shape, config, None)
    size, config = _size_and_config(cp_size, config)
    return _cached_layer_plans(layers, size, head_shape, config, token_multiple)


@lru_cache(maxsize=CAPACITY)
def _cached_layer_plans(
    layers: LayerMasks, cp_size: int, head_shape: HeadShape, config: MagiConfig, token_multiple: int
) -> tuple[AttnPlan, ...]:
    if len(layers) == 1:  # which another call may have planned
        return (cached_plan(layers[0][0], cp_size, head_shape, config, None, None, token_multiple),)
    return make_layer_plans(layers, cp_size, head_shape, config, token_multiple=token_multiple)


def _size_and_config(cp_size: int | CpGroup, config: MagiConfig) -> tuple[int, MagiConfig]:
    if isinstance(cp_size, int) or is_integer_like(cp_size):
        return integer(cp_size, "cp_size"), config
    return group_size(cp_size), with_nodes_of(cp_size, config)


def with_nodes_of(cp_group: CpGroup, config: MagiConfig) -> MagiConfig:
    """The config with the ranks of a node that a 2-D mesh names."""
    of_mesh, given = mesh_ranks_per_node(cp_group), config.costs.ranks_per_node
    if of_mesh is None or of_mesh == given:
        return config
    if given is not None:
        raise ValueError(
            f"CostTable.ranks_per_node must be that of the mesh, {of_mesh}, got {given}; leave it "
            f"out where a 2-D mesh names the nodes"
        )
    return replace(config, costs=replace(config.costs, ranks_per_node=of_mesh))
