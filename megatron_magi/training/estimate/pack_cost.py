"""Modelled time of a sample, by which samples are spread over steps and replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_magi.config import MagiConfig
from megatron_magi.core.mask.mask import AttnMask
from megatron_magi.core.plan import HeadShape, make_attn_plan
from megatron_magi.core.plan.stage_costs import stage_costs
from megatron_magi.training.data.packed_samples import PackedDataset, mask_of_documents
from megatron_magi.training.data.step_order import StepOrder, StepShape
from megatron_magi.training.estimate.flops import step_flops
from megatron_magi.training.recipe.run_config import RunConfig

BACKWARD_TILES = 2.5
"""A backward tile takes as long as 5/2 forward tiles, in the planner's model too."""


@dataclass(frozen=True)
class PackCost:
    """Nanoseconds of one GPU for a sample through all layers, without any exchange.

    Replicas of equal layout are compared, and their GPUs share this time alike.
    """

    forward_ns: int
    backward_ns: int

    @property
    def total_ns(self) -> int:
        return self.forward_ns + self.backward_ns


def pack_cost(mask: AttnMask, config: RunConfig) -> PackCost:
    """The planner's tiles at the cost table's rate, and all other products at the same rate."""
    attention = _attention_ns(mask, config)
    flops = step_flops(config.model, mask.total_seqlen_q, 0)
    forward = flops / 3 / config.magi.costs.kernel_tflops / 1e3
    again = {"none": 0.0, "attention": attention, "full": attention + forward}
    backward = BACKWARD_TILES * attention + 2 * forward + again[config.train.recompute]
    return PackCost(round(attention + forward), round(backward))


def sample_order(
    dataset: PackedDataset, config: RunConfig, dp_size: int, first_sample: int = 0
) -> Callable[[int], int]:
    """The number of the sample at each place of a run, as `data.balance_steps` wants it.

    Args:
        first_sample: place at which this start of the run begins.
    """
    if config.data.balance_steps is None:
        return lambda place: place

    def cost_of(number: int) -> int:
        mask = mask_of_documents(dataset.boundaries(number), config.data)
        return pack_cost(mask, config).total_ns

    batch, is_pipelined = config.train.global_batch_size, config.parallel.pp > 1
    shape = StepShape(config.data.balance_steps, batch // dp_size, dp_size, is_pipelined)
    return StepOrder(cost_of, shape, first_sample % batch).sample_at


def _attention_ns(mask: AttnMask, config: RunConfig) -> float:
    """Attention of all layers in one forward pass."""
    one_rank = MagiConfig(costs=replace(config.magi.costs, ranks_per_node=None))
    m = config.model
    heads = HeadShape(m.num_attention_heads, m.num_query_groups, m.kv_channels)
    tiles = int(make_attn_plan(mask, 1, heads, one_rank).loads.sum())
    tile_ps = stage_costs(heads, one_rank, mask.total_seqlen_q).tile_ps
    return config.model.num_layers * tiles * tile_ps / 1e3
