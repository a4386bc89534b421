"""The mask of the negative control is wrong by one token, and by no more."""

from __future__ import annotations

from pathlib import Path

from megatron_magi import masks
from megatron_magi.launcher.documents import MaskRequest
from megatron_magi.launcher.flags import load_mask_function

EXAMPLE = Path(__file__).parents[2] / "examples" / "moved_boundary.py"


def test_the_first_boundary_moves_by_a_token() -> None:
    function = load_mask_function(f"{EXAMPLE}:moved_boundary")
    mask = function(MaskRequest((0, 5, 9, 12), None))
    assert mask == masks.from_cu_seqlens([0, 6, 9, 12])
