"""The sample numbers that Megatron's batch samplers yield on all replicas, round by round."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from megatron_magi.balance.deal import Int64Array

IN_ORDER = "MegatronPretrainingSampler"
DRAWN = "MegatronPretrainingRandomSampler"
WHOLE = "MegatronFullValidationSampler"
"""Its batches follow a length that ranks have agreed on, and no steps: it stays."""


class StockRounds:
    """Rounds of one microbatch for every replica, int64 [replicas, micro] in Megatron's order.

    The samplers are functions of the consumed samples and a replica's number. A replica's copy
    would draw a permutation of all samples, so that the replicas share one where Megatron allows
    it: without --data-sharding. A last round that some replicas lack is dropped.
    """

    def __init__(self, sampler: Any) -> None:
        self.micro: int = sampler.micro_batch_size
        self.replicas: int = sampler.micro_batch_times_data_parallel_size // self.micro
        self._sampler = sampler
        self._consumed: int = sampler.consumed_samples

    def __iter__(self) -> Iterator[Int64Array]:
        if type(self._sampler).__name__ == IN_ORDER:
            yield from self._in_order()
            return
        drawn = self._of_shards() if self._sampler.data_sharding else self._of_one_list()
        for found in drawn:
            self._consumed += self.replicas * self.micro  # the next epoch goes on there
            yield found

    def _in_order(self) -> Iterator[Int64Array]:
        for batch in self._copy(micro_batch_size=self.replicas * self.micro):
            yield np.array(batch, np.int64).reshape(self.replicas, self.micro)

    def _of_one_list(self) -> Iterator[Int64Array]:
        """Every replica takes each `replicas`-th of the list."""
        batches = iter(self._copy(data_parallel_size=1))
        while len(group := list(islice(batches, self.replicas))) == self.replicas:
            yield np.array(group, np.int64).reshape(self.micro, self.replicas).T

    def _of_shards(self) -> Iterator[Int64Array]:
        copies = [self._copy(data_parallel_rank=rank) for rank in range(self.replicas)]
        for group in zip(*copies, strict=False):
            yield np.array(group, np.int64)

    def _copy(self, **changed: Any) -> Any:
        copied = copy.copy(self._sampler)
        vars(copied).update(
            {"data_parallel_rank": 0, "consumed_samples": self._consumed, **changed}
        )
        return copied
