"""`megatron_magi.run` that loses gradients: a control, which a comparison must catch.

Megatron's code and ours are as they are but for one function, which is wrapped here.
"""

from __future__ import annotations

import runpy
from typing import Any

import torch

from megatron_magi import run


def main() -> None:
    """Run the script that the command line names, with the error."""
    original = runpy.run_path

    def run_path(*args: Any, **kwargs: Any) -> Any:
        lose_gradients()
        return original(*args, **kwargs)

    runpy.run_path = run_path
    run.main()


def lose_gradients() -> None:
    """On context-parallel rank 0, sums of dk and dv without what the other ranks send."""
    from megatron_magi.core.runtime import staged_backward

    right = staged_backward.add_partials

    def wrong(own: Any, arriving: Any, dtype: torch.dtype) -> Any:
        from megatron.core import parallel_state  # once the launcher has prepared its import

        if parallel_state.get_context_parallel_rank() == 0:
            for reduce in arriving:
                reduce.wait()
            arriving = []
        return right(own, arriving, dtype)

    staged_backward.add_partials = wrong


if __name__ == "__main__":
    main()
