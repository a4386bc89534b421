"""`megatron_magi.run` that imports while another run trains, and goes on when a file appears.

llama.py starts runs of all GPUs so: a run's imports take 25 s, in which the GPUs would wait.
"""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path

import torch  # noqa: F401  imported early, as is the engine below

from megatron_magi import run

GATE = "EARLY_START_GATE"
"""A variable: the file that says that the GPUs are free."""
POLL_S = 0.1


def main() -> None:
    """Import, wait, and run the script that the command line names."""
    if importlib.util.find_spec("transformer_engine"):
        importlib.import_module("transformer_engine.pytorch")
    gate = Path(os.environ[GATE])
    while not gate.exists():
        time.sleep(POLL_S)
    run.main()


if __name__ == "__main__":
    main()
