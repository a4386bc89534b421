"""The search's table of readers on hundreds of ranks: it counts right and takes little memory.

csrc/planner/reader_counts.h divides a table into pages if it has more than 2^18 counts and few of
them are in use: here 512 ranks and more than 1,024 segments of packed documents.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from megatron_magi import AttnMask, HeadShape, masks
from megatron_magi.core.plan import make_attn_plan
from tests.knobs import magi_config

CP_SIZE = 512
TOKENS = CP_SIZE * 64
MOST_MIB = 100
"""A whole table of this size would be 270 MiB, and the search has two of them."""

IN_A_PROCESS_OF_ITS_OWN = """
import resource
import numpy as np
from megatron_magi import masks
from megatron_magi.core.plan.token_layout import choose_token_layout
from tests.knobs import magi_config

def mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10

ends = np.cumsum([0, *np.random.default_rng(0).integers(100, 12000, 4000)])
ends = [*ends[ends < 4096 * 4096].tolist(), 4096 * 4096]
mask = masks.from_cu_seqlens(ends)
choose_token_layout(mask, 4096, magi_config(chunk_size=1024, swap_trials=0))
before = mib()
choose_token_layout(mask, 4096, magi_config(chunk_size=1024))
print(mib() - before)
"""


def packed(window: int = -1) -> AttnMask:
    """Documents of 20 to 1,500 tokens, chunks of 16."""
    lengths = np.random.default_rng(1).integers(20, 1500, TOKENS // 20)
    ends = np.cumsum([0, *lengths])
    return masks.from_cu_seqlens([*ends[ends < TOKENS], TOKENS], window_size=(window, 0))


@pytest.mark.parametrize("mask", [packed(), packed(100)], ids=["documents", "windows"])
def test_the_search_in_pages_still_lowers_the_rows(mask: AttnMask) -> None:
    """With wrong counts it would be led astray: most proposals cost rows."""
    heads = HeadShape(8, 2, 64)
    plans = [
        make_attn_plan(
            mask, CP_SIZE, heads, magi_config(chunk_size=16, tile_q=16, tile_k=16, **more)
        )
        for more in ({"swap_trials": 0}, {})
    ]
    rows = [int(plan.rows_received.sum()) for plan in plans]
    assert rows[1] < 0.75 * rows[0], rows
    for plan, received in zip(plans, rows, strict=True):
        assert plan.layout.native.rows_to_travel(mask.slices) == received
    assert plans[1].imbalance <= max(plans[0].imbalance, 1.01)


def test_a_table_of_documents_takes_the_memory_of_what_is_read() -> None:
    """4,096 ranks and 16,777,216 tokens: most ranks read a few of the segments."""
    ran = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS_OF_ITS_OWN],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert float(ran.stdout) < MOST_MIB
