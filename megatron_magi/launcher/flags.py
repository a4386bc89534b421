"""Our flags on a Megatron command line: taken out before Megatron's parser sees it.

`--attention-backend magi` becomes a switch. Megatron's own value stays at its default, so saved
arguments hold nothing that a Megatron without this plugin could not read.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from megatron_magi.config import CostTable, ForwardMode, KernelBackend, MagiConfig, TransportChoice

MaskFunction = Callable[..., Any]
"""The function of `--magi-mask`: it takes a `launcher.documents.MaskRequest`."""

CONFIG_FLAGS: dict[str, dict[str, Any]] = {
    "chunk_size": {"type": int},
    "max_imbalance": {"type": float},
    "forward_mode": {"choices": get_args(ForwardMode)},
    "overlap_degree": {"type": int},
    "kernel_backend": {"choices": get_args(KernelBackend), "flag": "--magi-kernel"},
    "transport": {"choices": get_args(TransportChoice)},
    "deterministic": {"action": "store_true"},
    "dkv_reduce_in_fp32": {"action": "store_false", "flag": "--magi-dkv-in-input-dtype"},
    "keep_received_keys": {"action": "store_true"},
    "agreement_timeout_s": {"type": float, "flag": "--magi-timeout-s"},
}
"""MagiConfig fields with a flag: `--magi-` and the field's name, unless `flag` has another."""

COST_FLAGS: dict[str, dict[str, Any]] = {"ranks_per_node": {"type": int}}
"""Fields of its cost table with a flag, named in the same way."""

MEGATRON_BACKENDS = ("flash", "fused", "unfused", "local", "auto")


@dataclass(frozen=True)
class LauncherOptions:
    """Our flags, parsed."""

    config: MagiConfig
    mask_name: str | None = None
    """The value of --magi-mask, `package.module:function` or `FILE.py:function`."""
    balance_step: bool = False
    """Deal the samples of a step to replicas and microbatches by the cost of their attention."""

    def mask_function(self) -> MaskFunction | None:
        """The function itself.

        Raises:
            ValueError: no such module or function.
        """
        return None if self.mask_name is None else load_mask_function(self.mask_name)


def take_flags(argv: Sequence[str]) -> tuple[LauncherOptions | None, list[str]]:
    """(options, or None without `--attention-backend magi`; the arguments that are Megatron's).

    The last value of a flag counts, so a job's `magi` is switched off by another one behind it.

    A misspelt backend, flag or value ends the process with argparse's one line, as does a flag of
    magi without the switch.
    """
    parser = flag_parser()
    known, rest = parser.parse_known_args(list(argv))
    _refuse_misspelt(parser, rest)
    given = {name: value for name, value in vars(known).items() if value is not None}
    backend = given.pop("attention_backend", None)
    if backend != "magi":
        if given:
            parser.error(f"--attention-backend magi is required with {_flag_of(next(iter(given)))}")
        has_ours = not {"magi", "--attention-backend=magi"}.isdisjoint(argv)
        # Megatron's own parser would take each value in turn, and does not know ours.
        return None, [*rest, "--attention-backend", backend] if has_ours and backend else list(argv)
    mask_name, balance_step = given.pop("mask", None), given.pop("balance_step", False)
    try:
        costs = CostTable(**{name: given.pop(name) for name in COST_FLAGS if name in given})
        options = LauncherOptions(MagiConfig(costs=costs, **given), mask_name, balance_step)
        options.mask_function()
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    return options, rest


def _refuse_misspelt(parser: argparse.ArgumentParser, rest: list[str]) -> None:
    """Megatron has no flag that begins like ours, and some scripts ignore flags that they lack."""
    ours = [action.option_strings[0] for action in parser._actions]
    for word in rest:
        if word.startswith("--magi-"):
            flag = word.partition("=")[0]
            (nearest,) = difflib.get_close_matches(flag, ours, 1, cutoff=0)
            parser.error(
                f"a flag that begins with --magi- must be one of magi's, got {flag}; the nearest "
                f"is {nearest}"
            )


def flag_parser() -> argparse.ArgumentParser:
    """A parser of magi's flags alone."""
    parser = argparse.ArgumentParser(
        prog="megatron_magi", add_help=False, allow_abbrev=False, argument_default=None
    )
    parser.add_argument("--attention-backend", choices=("magi", *MEGATRON_BACKENDS))
    for name, settings in (CONFIG_FLAGS | COST_FLAGS).items():
        options = {key: value for key, value in settings.items() if key != "flag"}
        parser.add_argument(_flag_of(name), dest=name, default=None, **options)
    parser.add_argument("--magi-mask", dest="mask", metavar="MODULE:FUNCTION")
    parser.add_argument(
        "--magi-balance-step", dest="balance_step", action="store_true", default=None
    )
    return parser


def _flag_of(name: str) -> str:
    given = CONFIG_FLAGS.get(name, {}).get("flag")
    return given or f"--magi-{name.replace('_', '-')}"


def load_mask_function(name: str, flag: str = "--magi-mask") -> MaskFunction:
    """The function `package.module:function` or `PATH/file.py:function`, which `flag` names.

    Raises:
        ValueError: there is none, or it takes other arguments than a `MaskRequest`.
    """
    module_name, _, function = name.rpartition(":")
    try:
        is_file = module_name.endswith(".py")
        load = _module_of_file if is_file else importlib.import_module
        found = getattr(load(module_name), function)
    except Exception as error:  # importing runs the module, which may raise anything
        raise ValueError(
            f"{flag} must be package.module:function or FILE.py:function, got {name!r} "
            f"({type(error).__name__}: {error}); name a function that Python can import"
        ) from error
    if not callable(found):
        raise ValueError(f"{flag} must name a function, got {name!r}; name one")
    _check_arguments(found, name, flag)
    return found


@functools.cache
def _module_of_file(path: str) -> ModuleType:
    """The module that a file of Python holds, run once a process."""
    name = f"magi_mask_of_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no file of Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses of the file look for their module
    spec.loader.exec_module(module)
    return module


def _check_arguments(function: MaskFunction, name: str, flag: str) -> None:
    """Raise ValueError if it cannot be called with a MaskRequest alone."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions of C have none
        return
    try:
        signature.bind(None)
    except TypeError:
        raise ValueError(
            f"{flag} must name a function of one argument, the MaskRequest, got {name}{signature}; "
            f"read what it needs from the request"
        ) from None
