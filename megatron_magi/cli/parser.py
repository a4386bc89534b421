"""argparse with sentences for errors: what was wrong, and the nearest thing that is right."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn


class UsageError(Exception):
    """Wrong usage or input; ends the command line with exit code 2 and this text."""


class CommandParser(argparse.ArgumentParser):
    """A parser whose help keeps its line breaks and whose errors suggest."""

    _given: Sequence[str] = ()

    def __init__(self, **arguments: Any) -> None:
        arguments.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**arguments, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses unknown options in the sub-parser that knows the right ones."""
        self._given = list(sys.argv[1:] if args is None else args)
        found, unknown = super().parse_known_args(args, namespace)
        for word in unknown:
            if not word.startswith("-"):
                raise UsageError(
                    f"{self.prog} takes no further argument, got {word!r}; see {self.prog} --help"
                )
            self._refuse(word)
        return found, []

    def _refuse(self, word: str) -> NoReturn:
        option = word.partition("=")[0]
        hint = self.hint(option)
        raise UsageError(f"{self.prog} has no option {option}; {hint or 'see --help'}")

    def hint(self, option: str) -> str:
        """The nearest option of this command."""
        return nearest(option, self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        """Raise the error as one sentence that ends with the help to read."""
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice:
            known = [word.strip(" '") for word in choice[2].split(",")]
            hint = nearest(choice[1], known) or f"choose from {', '.join(known)}"
            where = message.split(":")[0].removeprefix("argument ")
            raise UsageError(f"{where} cannot be {choice[1]!r}; {hint}")
        if "required" in message:  # a mistyped option is the likelier reason
            for word in self._given:
                if word.startswith("--") and word.partition("=")[0] not in self.known_options():
                    self._refuse(word)
        raise UsageError(f"{message}; see {self.prog} --help")

    def known_options(self) -> set[str]:
        """Option strings of this parser and of the sub-commands below it."""
        known = set(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                known.update(*(parser._option_string_actions for parser in action.choices.values()))
        return known


def nearest(word: str, known: Sequence[str] | Any) -> str:
    """ "did you mean x?", or nothing if no known word is near."""
    near = get_close_matches(word, list(known), n=1, cutoff=0.55)
    return f"did you mean {near[0]}?" if near else ""


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """--json and --quiet, the same in every command."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--json", action="store_true", help="one JSON object on standard output")
    group.add_argument("--quiet", "-q", action="store_true", help="one line, or only problems")


MOST_NUMBERS = 2**20
LARGEST_NUMBER = 2**30


def numbers(text: str) -> list[int]:
    """ "4096,8192x3" -> [4096, 8192, 8192, 8192]; separated by commas or spaces.

    Raises:
        UsageError: what is not a number, one above 2^30, or more than 2^20 of them.
    """
    values: list[int] = []
    for word in re.split(r"[,\s]+", text.strip()):
        match = re.fullmatch(r"(\d{1,20})(?:x(\d{1,20}))?", word)
        if not match:
            raise UsageError(
                f"numbers must look like 4096,8192x3, got {_short(word)!r} in {_short(text)!r}; "
                f"separate them with commas, repeat one with xN"
            )
        number, times = int(match[1]), int(match[2] or 1)
        if number > LARGEST_NUMBER or len(values) + times > MOST_NUMBERS:
            raise UsageError(
                f"numbers must be at most {MOST_NUMBERS:,} and none above {LARGEST_NUMBER:,}, got "
                f"{word} after {len(values):,} others; use fewer or smaller ones"
            )
        values += [number] * times
    return values


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
