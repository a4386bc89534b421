"""The build gate finds what it is for."""

from __future__ import annotations

import pytest

from tools.check_ptxas import findings

CLEAN = """ptxas info    : Compiling entry function 'kernel_a' for 'sm_90a'
ptxas info    : Function properties for kernel_a
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""


def frame(stack: int, stores: int, loads: int) -> str:
    return CLEAN.replace(
        "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads",
        f"{stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads",
    )


def test_a_clean_log_passes() -> None:
    assert findings(CLEAN) == []


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("", "names no kernel"),
        (CLEAN + "ptxas info : (C7519) warpgroup.arrive is injected\n", "C7519: warpgroup.arrive"),
        (CLEAN + "ptxas info : (C7512) wgmma serialized\n", "C7512"),
        (frame(96, 0, 0), "kernel_a: stack frame of 96 bytes, at most 64"),
        (frame(8, 4, 4), "kernel_a: spills 4 bytes out, 4 in, without a reason"),
        (CLEAN + "ptxas info : Function properties for step\n", "step: a device function was not"),
    ],
)
def test_each_trouble_is_found(log: str, expected: str) -> None:
    (found,) = findings(log)
    assert expected in found


def test_a_reason_allows_a_spill() -> None:
    assert findings(frame(8, 4, 4), {"kernel_a": "once per tile"}) == []
