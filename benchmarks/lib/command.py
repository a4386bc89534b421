"""The command line of a running program, for its record."""

from __future__ import annotations

import sys


def command_line() -> str:
    """As it is typed in the checkout's root: by the module's name, not by its file."""
    spec = sys.modules["__main__"].__spec__
    program = ["-m", spec.name] if spec is not None else sys.argv[:1]
    return " ".join(["python", *program, *sys.argv[1:]])
