"""A run that imports while another one trains, and goes on when a file appears.

llama.py starts runs of all GPUs so: a run's imports take 25 s, in which the GPUs would wait.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import time
from pathlib import Path

import torch  # noqa: F401  imported early, as is the engine below

GATE, MODULE = "EARLY_START_GATE", "EARLY_START_MODULE"
"""Variables: the file that says that the GPUs are free, and what runs then."""
POLL_S = 0.1


def main() -> None:
    """Import, wait, and run the module with the arguments of this one."""
    if importlib.util.find_spec("transformer_engine"):
        importlib.import_module("transformer_engine.pytorch")
    gate = Path(os.environ[GATE])
    while not gate.exists():
        time.sleep(POLL_S)
    runpy.run_module(os.environ[MODULE], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
