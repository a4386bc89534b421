"""``megatron-magi doctor | plan | viz | train | compare | weights``."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

from megatron_magi.cli import compare, doctor, plan, train, viz, weights
from megatron_magi.cli.parser import CommandParser, UsageError

COMMANDS = {
    "doctor": doctor,
    "plan": plan,
    "viz": viz,
    "train": train,
    "compare": compare,
    "weights": weights,
}

EXAMPLES = """examples:
  megatron-magi doctor                                  what will run here, and why
  megatron-magi plan --lengths 8192x4,1000 --cp 8       balance and traffic of a mask
  megatron-magi viz --recipe recipes/tiny_llama_cpu.yaml --out pictures
  megatron-magi train tiny_llama_cpu --dry-run          memory, plan and time of a recipe
  megatron-magi compare runs/dense runs/magi            PASS or FAIL, a table and a figure
  megatron-magi weights export runs/llama/checkpoints --out llama-hf
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command.

    Returns:
        0: fine. 1: the command's own verdict is no (something required is missing, a run fails the
        comparison). 2: wrong usage or input, explained on standard error.
    """
    parser = CommandParser(
        prog="megatron-magi",
        description="See what will happen before GPU hours burn, and afterwards whether it did.",
        epilog=EXAMPLES + "\nHelp on one command: megatron-magi COMMAND --help",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        summary, _, details = str(module.__doc__).partition("\n")
        module.add_arguments(
            commands.add_parser(name, help=summary, description=summary, epilog=details.strip())
        )
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        parser.print_help()
        return 2
    try:
        options = parser.parse_args(arguments)
        with warnings.catch_warnings():
            # Megatron's notes on packages it would like to have say nothing about these commands.
            warnings.filterwarnings("ignore", module=r"megatron\.")
            return COMMANDS[options.command].run(options)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        sys.stderr.close()
        return 0
