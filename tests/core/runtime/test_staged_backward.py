"""When the backward's stages run concurrently."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_magi.core.comm.prepared_cast import PreparedCast
from megatron_magi.core.runtime import staged_backward

MOST_ROWS = {64: 24_576, 128: 12_288}
"""By head_dim: the rows of a rank up to which they may."""


def may(rows: int, head_dim: int = 128, **changed: Any) -> bool:
    """The answer for the Hopper kernels over symmetric memory, with one remote stage."""
    given = {"uses_sms": False, "deterministic": False, "is_cuda": True, **changed}
    remote = SimpleNamespace(cast=object.__new__(PreparedCast))
    work = SimpleNamespace(
        ready=SimpleNamespace(backward=[remote, SimpleNamespace(cast=None, sees=True)]),
        transport=SimpleNamespace(uses_sms=given["uses_sms"]),
        plan=SimpleNamespace(config=SimpleNamespace(deterministic=given["deterministic"])),
        backend=SimpleNamespace(adds_atomically=True),
    )
    q = SimpleNamespace(shape=(rows, 8, head_dim), is_cuda=given["is_cuda"])
    return staged_backward._may_run_concurrently(work, q, q)  # type: ignore[arg-type]


@pytest.mark.parametrize("head_dim", MOST_ROWS)
def test_stages_of_short_shards_run_concurrently_and_of_long_ones_do_not(head_dim: int) -> None:
    assert may(MOST_ROWS[head_dim], head_dim)
    assert not may(MOST_ROWS[head_dim] + 1, head_dim)


@pytest.mark.parametrize(
    "changed", [{"uses_sms": True}, {"deterministic": True}, {"is_cuda": False}]
)
def test_what_forbids_it(changed: dict[str, bool]) -> None:
    assert may(4096) and not may(4096, **changed)
