"""How a running program was started."""

from __future__ import annotations

import os
import sys

from megatron_magi.cli.parser import UsageError

RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun tells its processes, and torch.distributed reads."""


def command_line() -> str:
    """The command line, for a record, as it is typed in the checkout's root: by the module's name,
    not by its file."""
    spec = sys.modules["__main__"].__spec__
    program = ["-m", spec.name] if spec is not None else sys.argv[:1]
    return " ".join(["python", *program, *sys.argv[1:]])


def require_torchrun() -> None:
    """Raise UsageError in a process that torchrun has not started."""
    if any(name not in os.environ for name in RENDEZVOUS):
        raise UsageError(
            "ranks that torchrun has started are needed, got a process without them; start it as "
            "torchrun --nproc-per-node N -m MODULE"
        )
