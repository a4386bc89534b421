"""What the hooks share in one run of Bridge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_magi.bridge.batch import with_documents
from megatron_magi.launcher.documents import bounds_of_sample
from megatron_magi.launcher.drawn_ahead import DrawnAhead
from megatron_magi.launcher.launch import Launch
from megatron_magi.launcher.microbatch_documents import Microbatch


@dataclass
class BridgeLaunch(Launch):
    """A Launch that reads Bridge's samples, which every tensor-parallel rank draws itself."""

    config: Any = None
    """Bridge's ConfigContainer, once it is validated."""

    def bounds_of(self, sample: dict[str, Any]) -> list[int]:
        """The boundaries of a sample as Bridge's loaders give it."""
        return bounds_of_sample(with_documents(sample), self.eod(), self.expects_cu_seqlens())

    def eod(self) -> int | None:
        """The token that ends a document; None if documents do not end by it."""
        if not self.args.reset_attention_mask:
            return None
        return int(self.config.dataset.tokenizer.eod)

    def tensor_parallel_group(self) -> Any:
        """None: no rank has to be told about samples."""
        return None


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
