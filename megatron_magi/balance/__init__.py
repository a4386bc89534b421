"""Dealing the samples of a step by their attention cost: numpy only, no process group (L0).

    costs = [sample_cost(document_lengths(dataset, number), shape) for number in step]
    deal_step(np.array(costs), replicas, micro)

Samples of a step have equal tokens and unequal attention, and all replicas wait for the slowest.
"""

from megatron_magi.balance.cost import CostShape, sample_cost
from megatron_magi.balance.deal import deal_step, fullest, order_of_megatron
from megatron_magi.balance.lengths import document_lengths

__all__ = [
    "CostShape",
    "deal_step",
    "document_lengths",
    "fullest",
    "order_of_megatron",
    "sample_cost",
]
