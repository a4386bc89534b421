"""Gate on what ptxas said while the CUDA library was built; scripts/test.sh runs it.

    python -m tools.check_ptxas [LOG]    # default: the log of the current library

Fails on serialised or patched wgmma (C75xx), on functions that were not inlined, on stack frames
above 64 bytes and on spills without a reason in ALLOWED_SPILLS.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser

MAX_STACK_BYTES = 64
ALLOWED_SPILLS: dict[str, str] = {
    # "part of a kernel's mangled name": "why its spills are harmless",
    "Li64ELi192ELi128ELi64ELb1ELb1E": "forward, head_dim 64, softcap: four registers, kept where "
    "an item ends, and a few a step in the loop of softcaps above 55",
    "Li64ELi192ELi128ELi64ELb1ELb0E": "forward, head_dim 64, largest logits: three registers, "
    "kept where an item ends or a step has a larger logit than were known",
    "bfloat16Li128ELb0ELi128ELb0E": "backward, head_dim 128, bf16: two registers, read a few times "
    "in two steps, which have some 1000 instructions",
    "bfloat16Li128ELb1ELi128ELb0E": "the same, deterministic",
    "Li128ELb1ELi128ELb1E": "backward, head_dim 128, deterministic, softcap: one register, read "
    "once a step, which has some 1000 instructions",
}

MESSAGE = re.compile(r"\((C75\d\d)\)(.*)")
ENTRY = re.compile(r"Compiling entry function '(\w+)'")
FUNCTION = re.compile(r"Function properties for (\w+)")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def findings(log: str, allowed: dict[str, str] | None = None) -> list[str]:
    """Everything in the log that must not be there, one line each."""
    allowed = ALLOWED_SPILLS if allowed is None else allowed
    entries: set[str] = set()
    function, found = "", []
    for line in log.splitlines():
        if match := ENTRY.search(line):
            entries.add(match[1])
        if match := MESSAGE.search(line):
            found.append(f"{match[1]}:{match[2]}")
        if match := FUNCTION.search(line):
            function = match[1]
            if function not in entries:
                found.append(f"{function}: a device function was not inlined")
        if match := FRAME.search(line):
            stack, stores, loads = map(int, match.groups())
            if stack > MAX_STACK_BYTES:
                found.append(f"{function}: stack frame of {stack} bytes, at most {MAX_STACK_BYTES}")
            if stores + loads and not any(part in function for part in allowed):
                found.append(f"{function}: spills {stores} bytes out, {loads} in, without a reason")
    if not entries:
        found.append("the log names no kernel; build with -Xptxas -v")
    return found


def main(argv: list[str] | None = None) -> int:
    """Print the findings; 1 if there are any."""
    parser = CommandParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("log", nargs="?", type=Path, help="default: that of the current library")
    path: Path | None = parser.parse_args(argv).log
    if path is None:
        from megatron_magi.build import library_path

        path = library_path().with_suffix(".log")
    found = findings(path.read_text())
    print("\n".join(found) or f"{path.name}: no findings")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
