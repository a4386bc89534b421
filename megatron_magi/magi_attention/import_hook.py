"""Programs that import `magi_attention` run on this package after one call.

The modules are laid out as MagiAttention v1.1.1 publishes them; each name is ours.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NoReturn

from megatron_magi.magi_attention import dist_attn_config, mask_inference

PUBLISHED = "magi_attention"
"""The name of the package that programs import."""
OURS = "megatron_magi.magi_attention"
"""The module that has all names."""

LAYOUT: Mapping[str, Sequence[str] | None] = {
    "api": None,
    "api.functools": mask_inference.__all__,
    "api.magi_attn_interface": None,
    "common": ("AttnRange", "AttnRanges", "AttnForwardMeta"),
    "common.enum": ("AttnMaskType", "AttnOverlapMode"),
    "common.range": ("AttnRange", "RangeError"),
    "common.ranges": ("AttnRanges",),
    "config": [name for name in dist_attn_config.__all__ if name != "AttnOverlapMode"],
    "dist_attn_runtime_mgr": ("DistAttnRuntimeKey",),
    "functional": ("flex_flash_attn_func",),
    "functional.fa4": ("fa4_bwd", "fa4_fwd"),
    "functional.flex_flash_attn": ("flex_flash_attn_func",),
    "meta": (),
    "meta.collection": (),
    "meta.collection.calc_meta": ("FA4AttnArg",),
}
"""The names of every module; None: all of them."""


def install() -> None:
    """Let ``import magi_attention`` and its modules mean ours, in this process.

    A second call does nothing.

    Raises:
        RuntimeError: the published package is there to be imported, or is imported already.
    """
    present = sys.modules.get(PUBLISHED)
    if isinstance(present, _Module):
        return
    if present is not None or find_spec(PUBLISHED) is not None:
        raise RuntimeError(
            f"install() needs the name {PUBLISHED} to be free, got an installed package; uninstall "
            f"it, or import from {OURS} instead"
        )
    for name, module in _modules(sys.modules[OURS]).items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
        sys.modules[name] = module


def _modules(ours: ModuleType) -> dict[str, ModuleType]:
    """The modules of the layout by their names, parents first."""
    made: dict[str, ModuleType] = {PUBLISHED: _Module(PUBLISHED, {}, ours)}
    made[PUBLISHED].__dict__["__version__"] = ours.MAGI_ATTENTION_VERSION
    for path, names in LAYOUT.items():
        held = {n: getattr(ours, n) for n in (ours.__all__ if names is None else names)}
        held.pop("install", None)
        made[f"{PUBLISHED}.{path}"] = _Module(f"{PUBLISHED}.{path}", held, ours)
    return made


class _Module(ModuleType):
    """A module of the published layout, which says of a missing name that it is not here."""

    __path__: list[str] = []  # noqa: RUF012  a package without files: its modules are all here

    def __init__(self, name: str, names: Mapping[str, Any], ours: ModuleType) -> None:
        super().__init__(name, f"The names of {name}, as {ours.__name__} has them.")
        self.__dict__.update(names, __all__=sorted(names), _ours=ours)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        ours = self.__dict__["_ours"]
        raise missing(self.__name__, name, ours)


def missing(module: str, name: str, ours: ModuleType) -> ImportError | AttributeError:
    """The error for a name that a module of the layout does not have."""
    if name in ours.__all__:
        remedy = f"import it from {PUBLISHED}.api"
    else:
        try:
            getattr(ours, name)
        except ImportError as error:  # one that says what replaced it
            return error
        except AttributeError:
            remedy = "see docs/guides/migrating.md for what stands for it"
    return AttributeError(
        f"{module} has the names that {ours.__name__} has, got {name!r}; {remedy}"
    )
