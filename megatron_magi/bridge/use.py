"""One call before Bridge's `pretrain` or `finetune`."""

from __future__ import annotations

from typing import Any

from megatron_magi.adapter import MEGATRON_VERSION
from megatron_magi.bridge.refusals import refuse_config
from megatron_magi.config import MagiConfig
from megatron_magi.launcher.flags import LauncherOptions

_used: list[str] = []
"""The hooks that are in place; empty before the first call."""


def use_magi(config: Any, *, mask: str | None = None, **magi_options: Any) -> None:
    """Let Bridge's `pretrain(config, forward_step)` and `finetune` train with magi's attention.

    The recipe stays as it is, with any `context_parallel_size`. What would not work is refused
    before anything is built. The loss per token is set, and the average of gradients in collectives
    is switched off, each with one line on rank 0. Bridge and megatron.core are hooked in this
    process until it ends.

    Args:
        config: Bridge's ConfigContainer. Settings that change after this call are checked again
            when training begins.
        mask: `package.module:function`, as `--magi-mask` of the launcher.
        magi_options: fields of `MagiConfig`.

    Raises:
        SystemExit: settings that do not work, one line for each.
        TypeError, ValueError: no such field of MagiConfig, or no such value.
        RuntimeError: a second call in one process.
        HookError: a Megatron or Bridge whose code is not what we know.
    """
    if _used:
        raise RuntimeError(
            "use_magi must be called once in a process, got a second call; start another process "
            "for another job"
        )
    options = LauncherOptions(MagiConfig(**magi_options), mask)
    options.mask_function()
    refuse_config(config, options)
    _install(options)
    from megatron_magi.bridge.launch import say

    for line in _change_settings(config):
        say(line)


def _change_settings(config: Any) -> list[str]:
    model = getattr(config.model, "transformer", config.model)
    said = []
    if not model.calculate_per_token_loss:
        model.calculate_per_token_loss = True
        said.append(
            "model.calculate_per_token_loss is set: ranks hold different numbers of counted tokens"
        )
    if config.ddp.average_in_collective:
        config.ddp.average_in_collective = False
        said.append(
            "ddp.average_in_collective is not used: gradients are divided by counted tokens"
        )
    return said


def _install(options: LauncherOptions) -> None:
    # Here, because Bridge takes long to import, and refusals need nothing of it.
    from megatron_magi.bridge.hook_points import bridge_points
    from megatron_magi.bridge.launch import BridgeLaunch
    from megatron_magi.launcher.hook_points import check_points
    from megatron_magi.launcher.install import put_in_place

    points = bridge_points(MEGATRON_VERSION)
    check_points(points, MEGATRON_VERSION)
    launch = BridgeLaunch(options)
    put_in_place(points, launch)
    _used.extend(launch.installed)
