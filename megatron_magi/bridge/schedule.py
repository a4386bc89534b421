"""Bridge's schedules: what the launcher does to Megatron's, for batches that Bridge draws whole."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

from megatron.core.rerun_state_machine import RerunDataIterator

from megatron_magi.bridge.arguments import arguments_of
from megatron_magi.bridge.launch import BridgeLaunch, SeenSamples, say
from megatron_magi.bridge.refusals import is_vision, refuse_config
from megatron_magi.bridge.vision import pad_packs
from megatron_magi.launcher.schedule import run_schedule
from megatron_magi.launcher.session import hook
from megatron_magi.launcher.settings import take_settings


@hook
def wrap_setup(launch: BridgeLaunch, original: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    """For `setup`: the settings as Bridge has validated them are the ones that count."""
    refuse_config(state.cfg, launch.options)
    launch.config, launch.args = state.cfg, arguments_of(state.cfg)
    take_settings(launch, launch.args)
    line = pad_packs(state.cfg, launch.options.config) if is_vision(state.cfg.model) else None
    if line is not None:
        say(line)
    return original(state, *args, **kwargs)


@hook
def wrap_get_schedule(launch: BridgeLaunch, original: Any, *args: Any, **kwargs: Any) -> Any:
    """For `get_forward_backward_func` as Bridge's training and validation see it."""
    return functools.partial(_run, launch, original(*args, **kwargs))


def _run(launch: BridgeLaunch, schedule: Callable[..., Any], **kwargs: Any) -> Any:
    iterators = kwargs["data_iterator"]
    if launch.has_documents():
        several, count = isinstance(iterators, list), kwargs["num_microbatches"]
        seen = [_seen(launch, each, count) for each in (iterators if several else [iterators])]
        kwargs["data_iterator"] = seen if several else seen[0]
    return run_schedule(launch, schedule, **kwargs)


def _seen(launch: BridgeLaunch, iterator: Any, count: int) -> Any:
    if iterator is None or isinstance(iterator, RerunDataIterator):
        return iterator
    # With virtual stages it belongs to this step alone, and what is behind it to the next one.
    return SeenSamples(itertools.islice(iterator, count), launch.microbatch)


@hook
def wrap_tp_communicators(
    launch: BridgeLaunch, original: Any, model_config: Any, micro_batch_size: int
) -> Any:
    """For `_initialize_tp_communicators`: buffers take the rows of one padded stream."""
    length = model_config.seq_length
    model_config.seq_length, count = launch.stream_shape(length, micro_batch_size, model_config)
    try:
        return original(model_config, count)
    finally:
        model_config.seq_length = length
