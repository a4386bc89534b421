"""Megatron's flags on a command line, read to the end: every fault is one line."""

from __future__ import annotations

import argparse
import difflib
import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from megatron_magi.adapter import MEGATRON_VERSION
from megatron_magi.launcher.cpu import no_training_program
from megatron_magi.launcher.former_flags import FORMER_FLAGS


class RaisingParser(argparse.ArgumentParser):
    """Raises where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


@functools.cache
def megatron_parser() -> argparse.ArgumentParser:
    """The parser of Megatron's training scripts, ModelOpt's flags among them.

    It raises argparse.ArgumentError for a value that a flag does not take.

    Raises:
        ImportError: a megatron-core without the training program.
    """
    try:
        from megatron.training.arguments import add_megatron_arguments
    except ModuleNotFoundError as error:
        raise ImportError(no_training_program()) from error
    parser = RaisingParser(allow_abbrev=False, exit_on_error=False)
    parser = add_megatron_arguments(parser)
    try:
        from megatron.post_training.arguments import add_modelopt_args
    except ImportError:
        return parser
    with_modelopt: argparse.ArgumentParser = add_modelopt_args(parser)
    return with_modelopt


def read_flags(words: Sequence[str], script: str = "") -> tuple[Any, list[str]]:
    """Parse Megatron's flags without those that its parser does not take.

    Args:
        script: The pretrain script's source; flags that it names in quotes are left to it.

    Returns:
        Megatron's arguments, and one line for each kind of fault.
    """
    args, unknown, wrong = _parse(list(words))
    lines = [
        f"flags of Megatron {MEGATRON_VERSION} are required, got a wrong value: {fault}; mend it"
        for fault in wrong
    ]
    names = [name for name in _names(unknown) if not _is_named(name, script)]
    if names:
        lines.insert(
            0,
            f"flags of Megatron {MEGATRON_VERSION} are required, got unrecognized arguments: "
            f"{', '.join(_explained(name) for name in names)}; mend them, and leave out those "
            f"that your script adds itself",
        )
    return args, lines


def _parse(words: list[str]) -> tuple[Any, list[str], list[str]]:
    """(arguments, words that the parser lacks, faults of values); a flag with a wrong value counts
    as not given, but 500000.0 counts as the integer that it is."""
    wrong: list[str] = []
    while True:
        try:
            return *megatron_parser().parse_known_args(words), wrong
        except argparse.ArgumentError as error:
            names = (error.argument_name or "").split("/")
            rest = _without(words, names)
            if rest == words:
                raise
            whole = re.fullmatch(r"invalid int value: '(\d+)\.0*'", error.message)
            remedy = f"; write {whole[1]}" if whole else ""
            wrong.append(f"{names[-1]}: {error.message}{remedy}")
            words = [*rest, names[-1], whole[1]] if whole else rest


def _names(unknown: Sequence[str]) -> list[str]:
    """Unknown flags without their values, each once, and words that follow no unknown flag."""
    strays = itertools.takewhile(lambda word: not word.startswith("--"), unknown)
    flags = (word.partition("=")[0] for word in unknown if word.startswith("--"))
    return list(dict.fromkeys([*strays, *flags]))


def _without(words: list[str], names: Sequence[str]) -> list[str]:
    """The words without these flags and their values."""
    kept, is_kept = [], True
    for word in words:
        if word.startswith("--"):
            is_kept = word.partition("=")[0] not in names
        if is_kept:
            kept.append(word)
    return kept


def _is_named(flag: str, script: str) -> bool:
    return flag.startswith("-") and (f'"{flag}"' in script or f"'{flag}'" in script)


def _explained(flag: str) -> str:
    """The flag, and what Megatron has now in its place as far as that is known."""
    if flag in FORMER_FLAGS:
        return f"{flag} ({FORMER_FLAGS[flag]})"
    nearest = difflib.get_close_matches(flag, megatron_parser()._option_string_actions, 1, 0.85)
    return f"{flag} (the nearest is {nearest[0]})" if nearest else flag.strip() or repr(flag)
