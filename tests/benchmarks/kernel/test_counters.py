"""What is read of ncu's table."""

import subprocess
from typing import Any

import pytest

from benchmarks.kernel import counters

CELL = {"impls": "ours", "masks": "full"}


def ncu_that_says(*kernels: tuple[str, str]) -> Any:
    """subprocess.run of an ncu: a log, names, units, and a line for each (name, ns)."""
    metrics = counters.COUNTERS.values()
    names = ",".join(f'"{name}"' for name in ("ID", "Kernel Name", *metrics))
    units = ",".join('""' for _ in range(2 + len(metrics)))
    lines = [
        ",".join(f'"{x}"' for x in (i, name, ns, *["1,024"] * (len(metrics) - 1)))
        for i, (name, ns) in enumerate(kernels)
    ]
    said = "\n".join(["==PROF== Connected", names, units, *lines])
    return lambda *_, **__: subprocess.CompletedProcess([], 0, said, "no permission")


def test_the_longest_kernel_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    said = ncu_that_says(("prepare", "9,000"), ("bwd_kernel<Traits>", "31,000,000"), ("fill", "7"))
    monkeypatch.setattr(subprocess, "run", said)
    found = counters.count(CELL)
    assert (found["kernel"], found["ns"], found["clocks"]) == ("bwd_kernel<Traits>", 31e6, 1024)
    assert set(found) == {"kernel", *counters.COUNTERS}


def test_an_ncu_that_counts_nothing_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", ncu_that_says())
    with pytest.raises(SystemExit, match=r"no kernel(.|\n)*no permission"):
        counters.count(CELL)
