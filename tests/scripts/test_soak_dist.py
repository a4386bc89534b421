"""The long run of distributed attention: cases, its checks, and a short run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import soak_dist

    return soak_dist


def test_a_short_run(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPTS / "soak_dist.py", "--device", "cpu", "--ranks", "2"]
    command += ["--tokens", "64", "--iterations", "20", "--record", tmp_path / "soak.json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "20 iterations" in done.stdout and "0 wrong results" in done.stdout, done.stderr
    record = json.loads((tmp_path / "soak.json").read_text())
    assert len(record["ranks"]) == 2 and sum(record["ranks"][0]["kinds"].values()) == 20
    assert all(one["memory"][-1]["process"] > 0 for one in record["ranks"])


def test_cases_are_equal_on_every_rank_and_of_all_kinds(soak: ModuleType) -> None:
    cases = [soak.random_case(number, 2, 256, "cpu") for number in range(80)]
    again = [soak.random_case(number, 2, 256, "cpu") for number in range(80)]
    assert cases == again
    assert {case.kind for case in cases} == set(soak.KINDS)
    assert len({case.mask.digest for case in cases}) == 80


def test_a_wrong_result_is_found(soak: ModuleType) -> None:
    one = object.__new__(soak.Soak)
    one.args, one.device, one.dtype = (
        soak.parser().parse_args([]),
        torch.device("cpu"),
        torch.float32,
    )
    one.args.ranks, one.group, one.seen, one.wrong = 1, None, soak.Counter(), []
    one.plans = soak.deque(maxlen=2)
    right = one._alone
    one.step(0)
    assert not one.wrong
    one._alone = lambda case, whole: tuple(x + 1e-3 for x in right(case, whole))
    one.step(1)
    assert len(one.wrong) == 1 and "iteration 1" in one.wrong[0]


def test_growth_is_that_of_the_second_half(soak: ModuleType) -> None:
    warm = [{"process": x} for x in (10.0, 100.0, 100.0, 100.0, 100.0, 100.0, 100.0, 100.0)]
    assert soak.growth(warm, "process") == 0
    leak = [{"process": 100.0 + 8 * i} for i in range(40)]
    assert soak.growth(leak, "process") == 8 * 20
