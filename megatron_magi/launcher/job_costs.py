"""Costs of a job's layers, and how its replicas wait for each other, from Megatron's arguments."""

from __future__ import annotations

from typing import Any

from megatron_magi.adapter.model_shape import is_window_layer
from megatron_magi.balance.cost import TILE, CostShape
from megatron_magi.launcher.job_sizes import ModelSizes, dtype_of, heads_of, knows_heads


def cost_shape(args: Any) -> CostShape:
    """Costs of one query head, and of its share of the other products, in 2 * TILE * TILE flops.

    Without the sizes of heads, which a checkpoint or a script may bring, tiles alone count.
    """
    if not knows_heads(args):
        return CostShape(tile_cost=1, token_cost=0, full_layers=1)
    heads, window, sizes = heads_of(args), _window(args), ModelSizes(args, dtype_of(args))
    numbers = range(1, args.num_layers + 1)
    layers = [window is not None and is_window_layer(sizes, number) for number in numbers]
    products = 3 * args.num_layers * _weights_of_layer(args)
    return CostShape(
        tile_cost=4 * heads.head_dim + 3 * heads.value_dim,
        token_cost=products // (TILE * TILE * heads.num_heads_q),
        full_layers=layers.count(False),
        window_layers=layers.count(True),
        window=window or 0,
    )


def replicas_meet(args: Any) -> bool:
    """Returns True if replicas wait for each other in every layer: experts of a layer lie on
    several replicas, or a layer's weights are gathered from them."""
    experts = getattr(args, "expert_model_parallel_size", None) or 1
    tensor = args.tensor_model_parallel_size
    of_experts = getattr(args, "expert_tensor_parallel_size", None) or tensor
    if getattr(args, "num_experts", None) and (
        experts * of_experts > tensor * args.context_parallel_size
    ):
        return True
    if getattr(args, "use_torch_fsdp2", False):
        return True
    sharding = getattr(args, "data_parallel_sharding_strategy", None)
    return bool(getattr(args, "use_megatron_fsdp", False)) and sharding == "optim_grads_params"


def _weights_of_layer(args: Any) -> int:
    """Weights of a layer that multiply a token, on one tensor-parallel rank."""
    heads, hidden = heads_of(args), args.hidden_size
    inner = args.ffn_hidden_size or 4 * hidden
    if getattr(args, "num_experts", None):
        inner = (getattr(args, "moe_ffn_hidden_size", None) or inner) * args.moe_router_topk
    attention = heads.num_heads_q + heads.num_heads_kv
    mlp = (3 if getattr(args, "swiglu", False) else 2) * inner // args.tensor_model_parallel_size
    return hidden * (attention * (heads.head_dim + heads.value_dim) + mlp)


def _window(args: Any) -> int | None:
    """Tokens before its own that a row of a window layer sees; None for all."""
    window = getattr(args, "window_size", None)
    return None if window is None or int(window[0]) < 0 else int(window[0])
