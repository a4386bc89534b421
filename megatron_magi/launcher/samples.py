"""Samples on the host, between Megatron's data loader and the device.

The documents of a sample are read here, before Megatron moves it to the device. No rank waits for
the device to know them, and every pipeline stage knows them, also one that reads no rows.
"""

from __future__ import annotations

import inspect
from typing import Any

from megatron.core import parallel_state

from megatron_magi.launcher.drawn_ahead import DrawnAhead
from megatron_magi.launcher.launch import Launch, hook


@hook
def wrap_dataset_builder(
    launch: Launch, original: Any, self: Any, *args: Any, **kwargs: Any
) -> None:
    """For `BlendedMegatronDatasetBuilder.__init__`: with documents, every pipeline stage has data.

    Megatron builds it on middle stages for --sft only, although its get_batch asks for samples
    there under --dataloader-inter-document-masking too.
    """
    given = inspect.signature(original).bind(self, *args, **kwargs)
    if launch.has_documents():
        of_megatron = given.arguments["is_built_on_rank"]
        given.arguments["is_built_on_rank"] = lambda: (
            parallel_state.get_tensor_model_parallel_rank() == 0 or of_megatron()
        )
    original(*given.args, **given.kwargs)


@hook
def wrap_next_sample(launch: Launch, original: Any, self: Any) -> Any:
    """For `RerunDataIterator.__next__`: notes which sample it is and its documents, and draws
    samples ahead.

    Samples are drawn ahead below this iterator, so that it keeps and replays those of its own step.
    """
    if launch.sequences is None:
        return original(self)
    sample = _drawn(launch, original, self) if launch.has_documents() else original(self)
    launch.microbatch.identify(sample)
    return sample


def _drawn(launch: Launch, original: Any, self: Any) -> Any:
    if launch.plans_ahead() and not isinstance(self.iterable, DrawnAhead):
        self.iterable = DrawnAhead(self.iterable, launch.microbatch.see_ahead)
    sample = original(self)
    launch.microbatch.see(sample)
    return sample
