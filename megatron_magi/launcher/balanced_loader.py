"""Deals samples inside their step in Megatron's data loader, under --magi-balance-step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from megatron.core import num_microbatches_calculator as calculator
from megatron.core.datasets.utils import Split

from megatron_magi.balance import document_lengths
from megatron_magi.balance.deal import Int64Array
from megatron_magi.launcher.balance_refusals import FLAG
from megatron_magi.launcher.job_costs import cost_shape, replicas_meet
from megatron_magi.launcher.session import LauncherState, hook
from megatron_magi.launcher.step_balance import Rules
from megatron_magi.launcher.stock_rounds import DRAWN, IN_ORDER, WHOLE, StockRounds


class BalancedSampler:
    """Yields a rank's microbatches of dealt steps, in the place of a batch sampler of Megatron.

    A step has the samples that Megatron's sampler gives all replicas in it. It is a function of the
    consumed samples, so that a run that is loaded goes on with the same steps.
    """

    def __init__(
        self,
        sampler: Any,
        first_place: int,
        microbatches_at: Callable[[int], int],
        deal: Callable[[Int64Array], Int64Array],
    ) -> None:
        """
        Args:
            sampler: Megatron's.
            first_place: samples that were consumed before, as `microbatches_at` counts them.
            microbatches_at: microbatches of the step that begins after so many samples.
            deal: [microbatches, replicas, micro] to [replicas, microbatches, micro].
        """
        self.sampler = sampler
        self._rounds = StockRounds(sampler)
        self._place, self._left = first_place, 0
        self._microbatches_at, self._deal = microbatches_at, deal

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        rounds = iter(self._rounds)
        while True:
            if not self._left:  # else an epoch ended inside a step, which goes on here
                self._left = self._microbatches_at(self._place)
            step = list(islice(rounds, self._left))
            if not step:
                return
            self._left -= len(step)
            self._place += sum(each.size for each in step)
            yield from self._deal(np.stack(step))[self.sampler.data_parallel_rank].tolist()


def wrap_data_loader(original: Any, launch: Any) -> Any:
    """For `build_pretraining_data_loader`: gives the loader a sampler that deals its steps."""
    return _build_loader(original, launch) if launch.options.balance_step else original


@hook
def _build_loader(launch: LauncherState, original: Any, dataset: Any, consumed_samples: int) -> Any:
    """Megatron's loader, dealt.

    Raises:
        TypeError: a data set or a sampler whose steps we do not know.
    """
    loader = original(dataset, consumed_samples)
    sampler = getattr(loader, "batch_sampler", None)
    if loader is None or type(sampler).__name__ == WHOLE:
        return loader
    if type(sampler).__name__ not in (IN_ORDER, DRAWN):
        raise TypeError(
            f"{FLAG} requires Megatron's batch samplers, got {type(sampler).__name__}; leave "
            f"{FLAG} out"
        )
    if _takes_means_of_microbatches(launch, dataset, sampler):
        return loader
    document_lengths(dataset, 0)  # another data set is an error here, not in a step
    # torch refuses the assignment once a loader is made, and reads the entry when it iterates.
    vars(loader)["batch_sampler"] = _balanced(launch, dataset, sampler)
    return loader


def _takes_means_of_microbatches(launch: LauncherState, dataset: Any, sampler: Any) -> bool:
    """Returns True if the samples that share a microbatch change a loss: Megatron's validation of
    conversations takes the mean of the microbatches' own means."""
    is_joined = sampler.micro_batch_size > 1 and getattr(launch.args, "sft", False)
    return bool(is_joined and _split_of(dataset) != Split.train)


def _split_of(dataset: Any) -> Split:
    found: Split = getattr(dataset, "split", None) or dataset.index_split
    return found


def _balanced(launch: LauncherState, dataset: Any, sampler: Any) -> BalancedSampler:
    args, split = launch.args, _split_of(dataset)
    rules = Rules(cost_shape(args), args.pipeline_model_parallel_size > 1, replicas_meet(args))

    def deal(rounds: Int64Array) -> Int64Array:
        return launch.balance.deal(dataset, split.name, rounds, rules)

    if split == Split.train:
        # A schedule of batch sizes follows all samples, also where a phase counts its own.
        return BalancedSampler(sampler, args.consumed_train_samples, _schedule(), deal)
    batch = getattr(args, "eval_global_batch_size", None) or args.global_batch_size
    count = batch // sampler.micro_batch_times_data_parallel_size
    return BalancedSampler(sampler, sampler.consumed_samples, lambda place: count, deal)


def _schedule() -> Callable[[int], int]:
    """Microbatches by consumed samples. Workers draw ahead of the step, so that Megatron's own
    number is another step's: this is a copy of its calculator."""
    copied = copy.copy(calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR)

    def microbatches_at(place: int) -> int:
        copied.update(place, False, False)
        return int(copied.get())

    return microbatches_at
