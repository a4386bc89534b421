"""Will your Megatron job start with --attention-backend magi? Nothing is started.

Megatron's own parser reads the command line of your pretrain script; the launcher's rules judge it,
and then Megatron's own checks. Words before the script, such as torchrun's, are passed over.
Flags that Megatron does not know are named in one line, and the rest is judged without them.
Exit code 0: the job is accepted. 1: refused, with the lines that the launcher or Megatron would
print. 2: it cannot be read here, or there is no such script.

examples:
  megatron-magi check -- pretrain_gpt.py --context-parallel-size 2 ... --attention-backend magi
  megatron-magi check --gpus 16 -- PATH/pretrain_gpt.py ...        16 GPUs in all
  megatron-magi check --elsewhere -- PATH/pretrain_gpt.py ...      of a machine with other GPUs
  megatron-magi check -- pretrain_gpt.py --recipe llama3_1b_cp8    the flags of a recipe
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_magi import recipe
from megatron_magi.cli.parser import UsageError, add_output_options
from megatron_magi.run import PACKAGED, find_script

if TYPE_CHECKING:  # the options and their help need no Megatron
    from megatron_magi.launcher.job import Accepted, RefusedJob

UNKNOWN = "not known before it starts: data, memory, and the transport between ranks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpus", type=int, metavar="N",
        help="GPUs of the job (default: the fewest that its parallel sizes allow)",
    )  # fmt: skip
    parser.add_argument(
        "--elsewhere", action="store_true",
        help="the job runs on another machine: leave out the rules about this one",
    )  # fmt: skip
    add_output_options(parser)
    parser.add_argument("job", nargs=argparse.REMAINDER, metavar="-- SCRIPT FLAGS",
                        help="the job as you start it")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Read, judge, print; 0 or 1."""
    script, flags = _script_and_flags(options.job)
    _find_modules_like_the_launcher(script)
    source = script.read_text(errors="replace")
    from megatron_magi.launcher import job

    try:
        job.prepare_megatron()
        read = job.read_job(flags, source)
        accepted = job.judge(read, options.gpus, here=not options.elsewhere)
    except job.RefusedJob as refused:
        return _refuse(refused, options)
    if options.json:
        print(json.dumps({"accepted": True, **asdict(accepted)}))
    elif options.quiet:
        print("accepted")
    else:
        print(_line(accepted))
    return 0


def _script_and_flags(words: list[str]) -> tuple[Path, list[str]]:
    """The pretrain script, and what follows it.

    The script is the first word that ends in .py, or the name of the packaged one.
    """
    for number, word in enumerate(words):
        if word.endswith(".py") or word == PACKAGED:
            try:
                return _existing(find_script(word)), recipe.expand(words[number + 1 :])
            except recipe.RecipeFileError as error:
                raise UsageError(str(error)) from error
    got = " ".join(word for word in words[:3] if word != "--")
    raise UsageError(
        f"a pretrain script and its flags are required behind --, got {got or 'none'}; such as "
        f"megatron-magi check -- pretrain_gpt.py ... --attention-backend magi"
    )


def _existing(script: Path) -> Path:
    if not script.is_file():
        raise UsageError(
            f"the script must exist, got {str(script)!r} in {Path.cwd()}, and there is no such "
            f"file; give its path"
        )
    return script


def _find_modules_like_the_launcher(script: Path) -> None:
    """The script's folder first, where a checkout has Megatron, then the current folder."""
    if "" not in sys.path:  # as python -m has it; the command's own script does not
        sys.path.insert(0, "")
    sys.path.insert(0, str(script.resolve().parent))


def _refuse(refused: RefusedJob, options: argparse.Namespace) -> int:
    """Print the refusals; the exit code."""
    if options.json:
        print(json.dumps({"accepted": False, "refusals": refused.lines}))
        return 1
    print("\n".join(refused.lines))
    if refused.about_machine and not options.quiet:
        print(
            "note: some of these lines are about this machine; --elsewhere leaves them out",
            file=sys.stderr,
        )
    return 1


def _line(accepted: Accepted) -> str:
    a = accepted
    kernel = "kernel not known, as the job runs elsewhere"
    if a.kernel is not None:
        kernel = f"kernel {a.kernel} on this machine"
    return (
        f"accepted: {a.gpus} GPUs as tp {a.tp}, pp {a.pp}, cp {a.cp}, dp {a.dp}; {a.layers} "
        f"layers; heads {a.heads} on a rank; {kernel}; read by Megatron {a.megatron}; {UNKNOWN}"
    )
