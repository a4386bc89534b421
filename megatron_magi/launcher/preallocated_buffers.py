"""Sizes Megatron's preallocated buffers (TP overlap, CUDA graphs, YaRN) for the padded length.

Megatron computes them as sequence length times samples over context-parallel ranks. Under the flag
the samples of a microbatch are one stream, which the plan may have padded.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_magi.launcher.session import LauncherState, hook


@contextmanager
def stream_sizes(launch: LauncherState) -> Iterator[None]:
    """Megatron's arguments with the length and the number of samples of a stream."""
    args = launch.args
    length, count = args.seq_length, args.micro_batch_size
    args.seq_length, args.micro_batch_size = launch.stream_shape(length, count, args)
    try:
        yield
    finally:
        args.seq_length, args.micro_batch_size = length, count


@hook
def wrap_tp_communicators(launch: LauncherState, original: Any, *args: Any, **kwargs: Any) -> Any:
    """For `_initialize_tp_communicators`, which makes the buffers of `--tp-comm-overlap`."""
    with stream_sizes(launch):
        return original(*args, **kwargs)


@hook
def wrap_yarn_tables(
    launch: LauncherState, original: Any, self: Any, *args: Any, **kwargs: Any
) -> Any:
    """For `YarnRotaryEmbedding._set_cos_sin_cache`: the whole table, where Megatron cuts out two
    mirrored pieces, which requires a length that twice the ranks divide."""
    call = inspect.signature(original).bind(self, *args, **kwargs)
    call.arguments["packed_seq"] = True
    return original(*call.args, **call.kwargs)


@hook
def wrap_graph_helper(
    launch: LauncherState, original: Any, self: Any, *args: Any, **kwargs: Any
) -> Any:
    """For `TECudaGraphHelper.__init__`, which captures graphs on rows of this shape."""
    call = inspect.signature(original).bind(self, *args, **kwargs)
    given = call.arguments
    shape = launch.stream_shape(given["seq_length"], given["micro_batch_size"], given["config"])
    given["seq_length"], given["micro_batch_size"] = shape
    return original(*call.args, **call.kwargs)
