"""Saving and resuming without TransformerEngine and apex, as Megatron does it with them."""

from __future__ import annotations

from typing import Any

from megatron_magi.adapter.adam_state import finish_loading, is_fused, prepare_to_load
from megatron_magi.adapter.compat import write_checkpoints_in_process
from megatron_magi.launcher.session import LauncherState, hook


@hook
def wrap_load_checkpoint(
    launch: LauncherState, original: Any, ddp_model: Any, optimizer: Any, *args: Any, **kwargs: Any
) -> Any:
    """For `load_checkpoint`: torch's Adam gets back the step count that it was saved with."""
    if optimizer is None:
        return original(ddp_model, optimizer, *args, **kwargs)
    fused = is_fused(optimizer)
    prepare_to_load(optimizer)
    result = original(ddp_model, optimizer, *args, **kwargs)
    finish_loading(optimizer, fused)
    return result


@hook
def wrap_save_checkpoint(launch: LauncherState, original: Any, *args: Any, **kwargs: Any) -> Any:
    """For `save_checkpoint`: no writer process, which would import the main script again, unless
    saves are asynchronous."""
    write_checkpoints_in_process(is_async=launch.args.async_save)
    return original(*args, **kwargs)
