"""Plans of all masks of a model, on one token layout."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from operator import mul

from megatron_magi.checks import integer
from megatron_magi.config import MagiConfig
from megatron_magi.core.plan.attn_plan import AttnPlan
from megatron_magi.core.plan.head_shape import HeadShape
from megatron_magi.core.plan.make_plan import (
    check_problem,
    load_caps,
    make_attn_plan,
    predicted_us,
)
from megatron_magi.core.plan.token_layout import LayerMasks, choose_token_layout, ranks_per_node


def make_layer_plans(
    layers: LayerMasks,
    cp_size: int,
    head_shape: HeadShape,
    config: MagiConfig,
    *,
    token_multiple: int = 1,
) -> tuple[AttnPlan, ...]:
    """Plans every mask of a model on one token layout, which balances each of them.

    Ranks exchange rows in every layer. A rank with more work in the layers of one mask makes the
    others wait there, and less work in other layers does not make up for it.

    Args:
        layers: each mask of the model with its number of layers, all over the same tokens.
        token_multiple: as in `make_attn_plan`.

    Returns:
        A plan for each mask, in their order.

    Raises:
        ValueError: no mask, a number of layers below 1, masks of different lengths, or as
            `make_attn_plan`.
    """
    _check_layers(layers)
    if len(layers) == 1:
        ((mask, _),) = layers
        return (make_attn_plan(mask, cp_size, head_shape, config, token_multiple=token_multiple),)
    for mask, _ in layers:
        check_problem(mask, cp_size, head_shape, config, None, token_multiple)
    problems = [layers]
    if ranks_per_node(config, cp_size):  # between nodes, fewer rows may be worth a rank's wait
        problems += [((mask, 1),) for mask, _ in layers]
    found = []
    for problem, cap in product(problems, load_caps(config, cp_size)):
        capped = replace(config, max_imbalance=cap)
        layout = choose_token_layout(problem, cp_size, capped, token_multiple)
        on_layout = partial(make_attn_plan, layout=layout, token_multiple=token_multiple)
        found.append(tuple(on_layout(mask, cp_size, head_shape, config) for mask, _ in layers))
    if len(found) == 1:
        return found[0]
    counts = [count for _, count in layers]
    return min(found, key=lambda plans: sum(map(mul, counts, map(predicted_us, plans))))


def _check_layers(layers: LayerMasks) -> None:
    lengths = {n for mask, _ in layers for n in (mask.total_seqlen_q, mask.total_seqlen_k)}
    if len(lengths) != 1:
        raise ValueError(
            f"layers must have masks of one length, also of keys, got {sorted(lengths)}; pass the "
            f"masks of one sequence"
        )
    for _, count in layers:
        integer(count, "number of layers", 1)
