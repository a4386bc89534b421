"""State that the hooks share in one run of Bridge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron_magi.bridge.batch import with_documents
from megatron_magi.launcher.documents import bounds_of_sample
from megatron_magi.launcher.microbatch_documents import Microbatch
from megatron_magi.launcher.sample_prefetch import DrawnAhead
from megatron_magi.launcher.session import LauncherState


@dataclass
class BridgeLaunch(LauncherState):
    """A Launch that reads Bridge's samples, which every tensor-parallel rank draws itself."""

    config: Any = None
    """Bridge's ConfigContainer, once it is validated."""

    def bounds_of(self, sample: dict[str, Any]) -> list[int]:
        """The boundaries of a sample as Bridge's loaders give it."""
        return bounds_of_sample(with_documents(sample), self.eod(), self.expects_cu_seqlens())

    def lacks_documents(self, sample: Any) -> bool:
        """As Launch, by the names that Bridge's loaders give to boundaries."""
        return isinstance(sample, dict) and super().lacks_documents(with_documents(sample))

    def eod(self) -> int | None:
        """The token that ends a document; None if documents do not end by it."""
        if not self.args.reset_attention_mask:
            return None
        return int(self.config.dataset.tokenizer.eod)

    def tensor_parallel_group(self) -> Any:
        """None: no rank has to be told about samples."""
        return None


def say(line: str) -> None:
    """Print a line on rank 0, and on every rank before ranks are known."""
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(f"megatron_magi: {line}", flush=True)


class SeenSamples:
    """The microbatches of a step, with their documents noted.

    Bridge has drawn them as one batch, or gives views of its loader to virtual stages.

    They come from no iterator of Megatron's, which the launcher's hook would see.
    """

    def __init__(self, samples: Iterator[Any], microbatch: Microbatch) -> None:
        self._samples = DrawnAhead(samples, microbatch.see_ahead)
        self._microbatch = microbatch

    def __iter__(self) -> SeenSamples:
        return self

    def __next__(self) -> Any:
        sample = next(self._samples)
        self._microbatch.see(sample)
        return sample
