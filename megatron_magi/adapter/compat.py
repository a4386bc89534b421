"""Version of the installed Megatron-Core, and the differences between the supported versions.

`require_megatron()` refuses an unknown version and prepares the import. If Triton is absent, it
puts a stub in place of the only module of 0.19 that needs Triton at import. It also gives Python
3.11 the decorator `typing.override`, and keeps a disabled compiler from being imported.
`megatron_magi.adapter` calls it before any `megatron.core` import.
"""

from __future__ import annotations

import importlib.util
import queue
import runpy
import sys
import types
import typing
from pathlib import Path
from typing import Any, NamedTuple

from megatron_magi.debug import is_compiler_off

SUPPORTED_MINORS = ((0, 18), (0, 19), (0, 20))
SUPPORTED_TEXT = "0.18 to 0.20"
REMEDY = (
    "put a Megatron-LM checkout first on PYTHONPATH, or install megatron-core 0.19.2 (Python 3.12; "
    "on 3.11: pip install --no-deps --ignore-requires-python megatron-core==0.19.2)"
)
"""How to get a supported version. On Python 3.11 pip chooses 0.16.1 by itself."""
NEED_TRITON = ((0, 18), (0, 20))
"""Minor versions that import Triton unconditionally, in modules for which we have no stub."""


class MegatronVersion(NamedTuple):
    """(major, minor, patch) of a megatron-core."""

    major: int
    minor: int
    patch: int

    def __str__(self) -> str:
        return ".".join(str(number) for number in self)


def require_megatron() -> MegatronVersion:
    """Check the installed megatron-core and prepare its import.

    Raises:
        ImportError: megatron-core is missing, is a version that this adapter was not tried with, or
            needs Triton and Triton is absent.
    """
    version = installed_version()
    if version is None or version[:2] not in SUPPORTED_MINORS:
        raise ImportError(
            f"the Megatron adapter requires megatron-core {SUPPORTED_TEXT}, "
            f"got {version if version else 'none'}; {REMEDY}"
        )
    if version[:2] in NEED_TRITON and importlib.util.find_spec("triton") is None:
        raise ImportError(
            f"megatron-core {version} requires triton at import, also on the CPU, got none; pip "
            f"install triton"
        )
    _stub_paged_stash()
    _define_override()
    _skip_disabled_compiler()
    return version


def installed_version() -> MegatronVersion | None:
    """The version that the importable `megatron.core` reports, without importing it.

    It is read from package_info.py, so that a source checkout on the path is treated like a wheel.
    """
    try:
        spec = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    info = Path(spec.submodule_search_locations[0]) / "package_info.py"
    numbers = runpy.run_path(str(info))["VERSION"][:3] if info.is_file() else (0, 0, 0)
    return MegatronVersion(*numbers)


def _stub_paged_stash() -> None:
    """Put a stub in place of the Triton kernels of MoE paged stashing, which 0.19 always imports.

    The feature is off by default. With the stub it cannot be turned on; everything else works.
    """
    name = "megatron.core.transformer.moe.ops.paged_stash"
    if name in sys.modules or importlib.util.find_spec("triton") is not None:
        return
    stub = types.ModuleType(name)
    stub.__dict__.update(
        GLOBAL_BLOCK_SIZE=1024, paged_stash_copy_kernel=None, paged_stash_pop_kernel=None
    )
    sys.modules[name] = stub


def _define_override() -> None:
    """Give Python 3.11 the decorator that `megatron.training` imports from Python 3.12's typing."""
    if not hasattr(typing, "override"):
        from typing_extensions import override

        typing.override = override  # type: ignore[attr-defined]


def _skip_disabled_compiler() -> None:
    """Let torch.compile return its function at once where it is switched off.

    The function would run uncompiled all the same, but Megatron decorates functions at its import,
    and each process would import the compiler for that, which takes seconds.
    """
    if is_compiler_off():
        import torch

        torch.compile = _uncompiled


def _uncompiled(model: Any = None, **options: Any) -> Any:
    return model if model is not None else lambda function: function


def write_checkpoints_in_process(is_async: bool = False) -> None:
    """Let synchronous saves report through a plain queue instead of a queue server.

    Megatron starts a multiprocessing manager per rank for its asynchronous saves. This is a spawned
    process that imports the main script once more and outlives a killed rank. Without asynchronous
    saves the queue is used in one process only, so the manager is unnecessary.

    Args:
        is_async: saves go on in a process of their own, which needs Megatron's queue.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    given = getattr(filesystem_async, "_results_queue", True)
    if is_async and isinstance(given, queue.Queue):
        filesystem_async._results_queue = None
    elif not is_async and given is None:
        filesystem_async._results_queue = queue.Queue()
