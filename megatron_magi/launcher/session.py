"""State that the hooks share in one run of a pretrain script with `--attention-backend magi`."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron.core import parallel_state

from megatron_magi.adapter.graphs import captures_attention
from megatron_magi.adapter.packed import (
    MagiPackedSeqParams,
    make_packed_seq_params,
    pipeline_seq_length,
)
from megatron_magi.core.mask.mask import MaskOfLayers
from megatron_magi.launcher.documents import (
    BY_CU_SEQLENS,
    bounds_of_sample,
    has_documents,
    repeatable,
)
from megatron_magi.launcher.flags import LauncherOptions, MaskFunction
from megatron_magi.launcher.microbatch_documents import Microbatch
from megatron_magi.launcher.plan_prefetch import PlansAhead
from megatron_magi.launcher.step_balance import StepBalance

Key = tuple[tuple[int, ...], MaskOfLayers | None]
"""A microbatch: its boundaries, and the digest of its mask if that is not causal in each."""

NUM_RECENT = 16
"""Microbatches that are remembered; one holds a few index tensors on the device."""


def hook(body: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """A function of (launch, original, what a call passes), in the form of `HookPoint.wrap`."""

    @functools.wraps(body)
    def wrap(original: Any, launch: Any) -> Any:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            return body(launch, original, *args, **kwargs)

        return run

    return wrap


@dataclass
class StepStats:
    """Figures of the plans of one step, summed over its microbatches on this rank."""

    num_plans: int = 0
    imbalance: float = 0.0
    """Highest load of a rank over the mean."""
    received: float = 0.0
    """Key rows that come from other ranks, as a fraction of the stream's."""
    plan_ms: float = 0.0
    """Milliseconds that the main thread spends on plans; almost 0 if they were made ahead."""
    has_label: bool | None = None
    """True if a sample of this replica had a token that counts; None if none came over the host."""

    def means(self) -> dict[str, float]:
        """By the names that Megatron's log and TensorBoard show."""
        count = max(1, self.num_plans)
        return {
            "magi imbalance": self.imbalance / count,
            "magi key rows received": self.received / count,
            "magi plan ms": self.plan_ms / count,
        }


@dataclass
class LauncherState:
    """Options, and what becomes known while the script runs."""

    options: LauncherOptions
    args: Any = None
    """Megatron's arguments, once they are validated."""
    first_args: Any = None
    """A copy of them as they were validated, for a run that may begin again in this process."""
    model_config: Any = None
    """TransformerConfig of the model, once a model chunk is built."""
    startup_line: str | None = None
    """The line that says what runs; None until `opening.open_groups` has run."""
    has_said_startup: bool = False
    documents: str = "not masked"
    """Where the documents of the last microbatch came from, and their number."""
    sequences: tuple[int, int] | None = None
    """(sequences in a microbatch, tokens in each) of the schedule that runs; None outside one."""
    stats: StepStats = field(default_factory=StepStats)
    balance: StepBalance = field(default_factory=StepBalance)
    """The steps that this rank's loaders dealt, under --magi-balance-step."""
    installed: list[str] = field(default_factory=list)
    """Names of the hook points that are in place."""
    _recent: dict[Key, MagiPackedSeqParams] = field(default_factory=dict, repr=False)
    """Microbatches; the one that was used last comes last."""

    def __post_init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._ahead: PlansAhead[Key, MagiPackedSeqParams] = PlansAhead(
            lambda key: self._make(list(key[0]), None)
        )
        self.microbatch = Microbatch(self.bounds_of, self._plan_ahead)

    def forget_groups(self) -> None:
        """Drop what belongs to the groups of a run that has ended; another one may begin."""
        self._ahead.end()
        self._recent.clear()
        self.model_config, self.sequences, self.stats = None, None, StepStats()
        self.startup_line, self.has_said_startup = None, False
        self.balance = StepBalance()
        self._begin()  # a new microbatch: the old one keeps a group of the tensor-parallel ranks

    def bounds_of(self, sample: dict[str, Any]) -> list[int]:
        """The boundaries of a sample as the data loader gives it."""
        return bounds_of_sample(sample, self.eod(), self.expects_cu_seqlens())

    def expects_cu_seqlens(self) -> bool:
        """Returns True if Megatron's arguments promise cu_seqlens in every sample."""
        return any(getattr(self.args, name, False) for name in BY_CU_SEQLENS)

    def lacks_documents(self, sample: Any) -> bool:
        """Returns True for a sample without the cu_seqlens that Megatron's arguments promise."""
        return isinstance(sample, dict) and sample.get("cu_seqlens") is None

    def has_documents(self) -> bool:
        """Returns True if Megatron's arguments divide sequences into documents."""
        return has_documents(self.args)

    def eod(self) -> int | None:
        """The token that ends a document; None if documents do not end by it."""
        if not self.args.reset_attention_mask:
            return None
        from megatron.training import get_tokenizer

        return int(get_tokenizer().eod)

    def mask_function(self) -> MaskFunction | None:
        """That of --magi-mask; None without one."""
        function = self.options.mask_function()
        num_chunks = getattr(self.args, "virtual_pipeline_model_parallel_size", None) or 1
        return function if function is None or num_chunks == 1 else repeatable(function)

    def plans_ahead(self) -> bool:
        """True if samples are drawn, and their plans made, before their microbatch.

        A function of --magi-mask may read rows on the device. An external data loader may save its
        position, which must not be ahead.
        """
        is_external = getattr(self.args, "dataloader_type", None) == "external"
        return self.has_documents() and self.options.mask_name is None and not is_external

    def captures_attention(self) -> bool:
        """True if Megatron's CUDA graphs hold attention; its batches then stay as they are."""
        return captures_attention(self.args)

    def joins_samples(self) -> bool:
        """True if the samples of a microbatch become one stream of several."""
        return bool(self.args.micro_batch_size > 1) and not self.captures_attention()

    def stream_shape(self, length: int, count: int, model_config: Any) -> tuple[int, int]:
        """(seq_length, micro_batch_size) that Megatron's schedules and buffers have for ``count``
        samples of ``length`` tokens: one stream, padded as the plan pads it; or Megatron's own."""
        if self.captures_attention():
            return length, count
        return pipeline_seq_length(length * count, model_config, self.options.config), 1

    def cp_group(self) -> Any:
        """The context-parallel group; None for one rank."""
        if parallel_state.get_context_parallel_world_size() == 1:
            return None
        return parallel_state.get_context_parallel_group()

    def tensor_parallel_group(self) -> Any:
        """The group whose first rank tells the others about its samples; None for one rank."""
        if parallel_state.get_tensor_model_parallel_world_size() == 1:
            return None
        return parallel_state.get_tensor_model_parallel_group()

    def plan(self, bounds: list[int], mask: MaskOfLayers | None = None) -> MagiPackedSeqParams:
        """Plan a microbatch of documents with these boundaries, and count it.

        Equal microbatches, and the model chunks of one, share what was planned.
        """
        started = time.perf_counter()
        key: Key = (tuple(bounds), mask)
        packed = self._recent.pop(key, None) or self._ahead.take(key)
        if packed is None:
            packed = self._make(bounds, mask)
        self._recent[key] = packed
        if len(self._recent) > NUM_RECENT:
            del self._recent[next(iter(self._recent))]
        self._count(packed, (time.perf_counter() - started) * 1e3)
        return packed

    def take_stats(self) -> dict[str, float]:
        """The means since the last call."""
        means = self.stats.means()
        self.stats = StepStats()
        return means

    def _plan_ahead(self, bounds: list[int]) -> None:
        key: Key = (tuple(bounds), None)
        if key not in self._recent and self.plans_ahead():
            self._ahead.begin(key)

    def _make(self, bounds: list[int], mask: MaskOfLayers | None) -> MagiPackedSeqParams:
        return make_packed_seq_params(
            bounds,
            self.model_config,
            self.cp_group(),
            magi_config=self.options.config,
            mask="causal" if mask is None else mask,
        )

    def _count(self, packed: MagiPackedSeqParams, plan_ms: float) -> None:
        plan = packed.token_plan
        rank_plan = plan.rank_plan(parallel_state.get_context_parallel_rank())
        casts = [stage.cast for stage in rank_plan.forward_stages if stage.cast is not None]
        self.stats.num_plans += 1
        self.stats.imbalance += plan.imbalance
        self.stats.received += sum(cast.num_recv for cast in casts) / plan.layout.padded_seqlen
        self.stats.plan_ms += plan_ms
