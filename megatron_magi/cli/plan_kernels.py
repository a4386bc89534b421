"""`megatron-magi plan --measure`: kernel times on this machine beside the predicted ones."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_magi.cli.parser import UsageError

if TYPE_CHECKING:  # the options and their help need no torch
    from megatron_magi.core.plan import AttnPlan

MOST_ON_A_CPU = 2**28
"""Cells of kernel tiles times query heads that PyTorch's reference computes in a few seconds."""
FAST_LINK_GIB_S = 1e9
"""A link so fast that rows take no time; the fixed cost of an exchange stays in the prediction."""


def measured_kernels(plan: AttnPlan, num_ranks: int) -> dict[str, Any]:
    """The times of the first ranks' kernels, one after the other and without exchanges.

    Args:
        num_ranks: the most ranks to measure, from rank 0 on.

    Returns:
        The device's name, and for each rank predicted and measured microseconds of forward and
        backward.

    Raises:
        UsageError: no GPU and too large a mask.
    """
    import torch

    from megatron_magi.core.plan import predict_times
    from megatron_magi.core.runtime.measure.measured_times import kernel_times

    device = "cuda" if torch.cuda.is_available() else "cpu"
    cells = _cells(plan) * plan.head_shape.num_heads_q
    if device == "cpu" and cells > MOST_ON_A_CPU:
        raise UsageError(
            f"--measure requires a GPU for more than {MOST_ON_A_CPU:,} cells times heads, "
            f"got {cells:,} and no GPU; leave --measure out, or take a smaller mask"
        )
    link: dict[str, Any] = dict.fromkeys(("link_gib_s", "node_link_gib_s"), FAST_LINK_GIB_S)
    alone = replace(plan.config.costs, stage_latency_us=0.0, **link)
    predicted = predict_times(plan, alone)
    ranks = []
    for rank in range(min(plan.cp_size, num_ranks)):
        forward_us, backward_us = kernel_times(plan, rank, device)
        ranks.append({
            "predicted_forward_us": float(predicted.forward[rank, -1, 3]),
            "forward_us": forward_us,
            "predicted_backward_us": float(predicted.backward[rank]),
            "backward_us": backward_us,
        })  # fmt: skip
    name = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    return {"device": name, "ranks": ranks}


def _cells(plan: AttnPlan) -> int:
    """The cells that a kernel goes through: those of the tiles that the mask touches, and of at
    least one tile for every ``tile_q`` rows, because rows that see nothing take time and memory
    too."""
    costs = plan.config.costs
    tiles = max(int(plan.loads.sum()), -(-plan.layout.padded_seqlen // costs.tile_q))
    return tiles * costs.tile_q * costs.tile_k


def kernel_table(measured: dict[str, Any]) -> list[str]:
    """Lines of the report."""
    lines = [
        f"kernels of each rank on {measured['device']}, without exchanges, in us",
        f"{'rank':>4} {'forward predicted':>18} {'measured':>9} {'backward predicted':>19} "
        f"{'measured':>9}",
    ]
    for number, rank in enumerate(measured["ranks"]):
        lines.append(
            f"{number:>4} {rank['predicted_forward_us']:>18.0f} {rank['forward_us']:>9.0f} "
            f"{rank['predicted_backward_us']:>19.0f} {rank['backward_us']:>9.0f}"
        )
    return lines
