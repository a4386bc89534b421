"""`megatron_magi.run` with weights drawn by parameter name: one model in every layout.

Megatron draws weights rank by rank, so tensor- and pipeline-parallel runs start elsewhere. Used by
the `agree` part of pretrain.py.
"""

from __future__ import annotations

import functools
import runpy
import sys
from pathlib import Path
from typing import Any

from benchmarks.lib import shared_gpu
from megatron_magi import run

EXAMPLES = Path(__file__).parents[2] / "examples"


def main() -> None:
    """Run the script that the command line names; models get their weights when they are built."""
    original = runpy.run_path

    def run_path(*args: Any, **kwargs: Any) -> Any:
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        for model in (GPTModel, HybridModel):
            model.__init__ = with_named_weights(model.__init__)
        return original(*args, **kwargs)

    runpy.run_path = run_path
    if shared_gpu.is_shared():
        shared_gpu.allow_peer_reads()
    run.main()


def with_named_weights(build: Any) -> Any:
    """A model's `__init__` that draws the weights by name in the end."""
    sys.path.append(str(EXAMPLES))  # a Megatron checkout before us has a package examples too
    from init_by_name import init_by_name

    @functools.wraps(build)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        init_by_name(self)

    return __init__


if __name__ == "__main__":
    main()
