"""What ranks run for test_te.py."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megatron_magi import AttnMask, HeadShape, MagiConfig

STAND_IN = str(Path(__file__).parent / "engine_stand_in")


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """TransformerEngine's stand-in is importable, and afterwards as unknown as before: Megatron's
    modules, which other tests of this process import, look for the package."""
    with mock.patch.object(sys, "path", [STAND_IN, *sys.path]):
        try:
            yield
        finally:
            for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
                del sys.modules[name]


def compare(rank: int, name: str, mask: AttnMask, heads: HeadShape) -> dict[str, Any]:
    """TransformerEngine's method, on the stand-in: how far it is from ours (`off`) and its rows of
    `padding`, or the `reason` why it cannot run."""
    from benchmarks.distributed.calls import CannotRun, Ours, Problem
    from benchmarks.distributed.te import TransformerEngine

    x = Problem.random(mask, heads, torch.empty(0, dtype=torch.float64))
    with stand_in(), mock.patch("torch.cuda.Stream"):  # there is no GPU here
        try:
            call = TransformerEngine(x, name)
        except CannotRun as error:
            return {"reason": str(error)}
    for _ in range(2):  # a graph can be walked once: each backward has a forward before it
        call.before_backward()
        call.backward()
    assert call.forward()[0].numel() == call.dout.numel()
    ours = Ours(x, MagiConfig()).full()
    off = max(float((a - b).abs().max()) for a, b in zip(call.full(), ours, strict=True))
    return {"off": off, "padding": call.layout.padding_tokens}
