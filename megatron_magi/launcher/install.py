"""Put the hooks in place, as the command line asks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from megatron_magi import recipe
from megatron_magi.adapter import MEGATRON_VERSION
from megatron_magi.adapter.monkeypatch import Swap, replace_everywhere
from megatron_magi.launcher.cpu import install_cpu_training, skip_compilation_of_wheels
from megatron_magi.launcher.flags import LauncherOptions, take_flags

if TYPE_CHECKING:
    from megatron_magi.launcher.hook_points import HookPoint
    from megatron_magi.launcher.session import LauncherState


def install() -> None:
    """Expand recipes in `sys.argv`, take magi's flags out of it, and hook this process's Megatron.

    A pretrain script calls it before it parses arguments; `megatron_magi.run` does it for a script
    that does not. Without `--attention-backend magi` Megatron is left alone, except that a machine
    without CUDA gets what it needs to run at all.

    Raises:
        SystemExit: flags that do not parse, or a Megatron whose code is not what we know, in one
            line.
    """
    try:
        words = recipe.expand(sys.argv[1:])
    except recipe.RecipeFileError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    options, rest = take_flags(words)
    sys.argv[1:] = rest
    skip_compilation_of_wheels()
    install_cpu_training()
    if options is not None:
        _install_hooks(options)


@functools.cache
def _install_hooks(options: LauncherOptions) -> None:
    from megatron_magi.launcher.hook_points import HookError, check, points_of
    from megatron_magi.launcher.session import LauncherState

    try:
        check(MEGATRON_VERSION)
    except HookError as error:
        raise SystemExit(f"megatron_magi: {error}") from error
    put_in_place(points_of(MEGATRON_VERSION), LauncherState(options))


def put_in_place(points: Iterable[HookPoint], launch: LauncherState) -> None:
    """Replace what the rows name, and note their names in the launch."""
    everywhere = []
    for point in points:
        owner, name = point.owner()
        original = getattr(owner, name)
        replacement = point.wrap(original, launch)
        if replacement is original:
            continue
        setattr(owner, name, replacement)
        if point.everywhere:
            everywhere.append(Swap(original, replacement))
        launch.installed.append(point.name)
    replace_everywhere(*everywhere)
