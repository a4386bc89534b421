"""``megatron-magi doctor | check | plan | viz | data | compare``."""

from __future__ import annotations

import argparse
import ast
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from megatron_magi import __version__
from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser, UsageError

COMMANDS = ("doctor", "check", "plan", "viz", "data", "compare")
"""Modules of this package; the first line of each one's docstring is its help."""

ANSWERED_ALONE = ("-h", "--help", "--version")
"""Options that no command's module is imported for, as some of them import torch."""

EXAMPLES = """examples:
  megatron-magi doctor                                  what will run here, and why
  megatron-magi check -- pretrain_gpt.py ...            will this Megatron job start with ours?
  megatron-magi plan --lengths 8192x4,1000 --cp 8       balance and traffic of a mask
  megatron-magi viz --lengths 8192x4 --cp 8 --out pictures
  megatron-magi data my_texts/ --output runs/data/mine  packs text for training
  megatron-magi compare runs/dense runs/magi            PASS or FAIL, a table and a figure
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command.

    Returns:
        0: success. 1: the command's verdict is no (something required is missing, a run fails the
        comparison). 2: wrong usage or input, explained on standard error. 130: Ctrl-C. 141: the
        reader of a pipe has closed it.
    """
    return run_cli(partial(_main, list(sys.argv[1:] if argv is None else argv)))


def _main(arguments: list[str]) -> int:
    parser = _parser(arguments)
    if not arguments:
        parser.print_help()
        return 2
    if arguments[0].startswith("-") and arguments[0] not in ANSWERED_ALONE:
        raise UsageError(
            f"megatron-magi takes a COMMAND first, got {arguments[0]}; "
            f"{parser.hint(arguments[0]) or 'see megatron-magi --help'}"
        )
    options = parser.parse_args(arguments)
    with warnings.catch_warnings():
        # Megatron's warnings about optional packages do not matter to these commands.
        warnings.filterwarnings("ignore", module=r"megatron\.")
        code: int = import_module(f"megatron_magi.cli.{options.command}").run(options)
        return code


def _parser(arguments: Sequence[str]) -> CommandParser:
    parser = CommandParser(
        prog="megatron-magi",
        description="See what will happen before GPU hours burn, and afterwards whether it did.",
        epilog=EXAMPLES + "\nHelp on one command: megatron-magi COMMAND --help",
    )
    parser.add_argument("--version", action="version", version=f"megatron_magi {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        if name in arguments[:1]:
            _add_command(commands, name)
        else:  # not imported: a module may import Megatron, and `check` looks for another one
            commands.add_parser(name, help=_summary(name))
    return parser


def _summary(name: str) -> str:
    """The first line of a command's docstring, without its imports."""
    source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    return str(ast.get_docstring(ast.parse(source))).partition("\n")[0]


def _add_command(commands: argparse._SubParsersAction[CommandParser], name: str) -> None:
    """Import a command's module and add its parser."""
    module = import_module(f"megatron_magi.cli.{name}")
    summary, _, details = str(module.__doc__).partition("\n")
    parser = commands.add_parser(name, help=summary, description=summary, epilog=details.strip())
    module.add_arguments(parser)
