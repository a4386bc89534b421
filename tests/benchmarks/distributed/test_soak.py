"""The long run of distributed attention: cases, its checks, and a short run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.distributed import soak
from megatron_magi.cli.parser import UsageError

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_a_short_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.distributed.soak", "--device", "cpu"]
    command += ["--ranks", "2"]
    command += ["--tokens", "64", "--iterations", "20", "--record", tmp_path / "soak.json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert "20 iterations" in done.stdout and "0 wrong results" in done.stdout, done.stderr
    record = json.loads((tmp_path / "soak.json").read_text())
    assert len(record["rows"]) == 2 and sum(record["rows"][0]["kinds"].values()) == 20
    assert all(one["memory"][-1]["process"] > 0 for one in record["rows"])


def test_cases_are_equal_on_every_rank_and_of_all_kinds() -> None:
    cases = [soak.random_case(number, 2, 256, "cpu") for number in range(80)]
    again = [soak.random_case(number, 2, 256, "cpu") for number in range(80)]
    assert cases == again
    assert {case.kind for case in cases} == set(soak.KINDS)
    assert len({case.mask.digest for case in cases}) == 80


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
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
    one._alone, attend = right, soak.magi.dist_attn

    def wrong_lse(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attend(*args)
        return out, lse + 1e-2

    monkeypatch.setattr(soak.magi, "dist_attn", wrong_lse)
    one.step(2)
    assert len(one.wrong) == 2, "out and gradients are right"


def test_rows_that_see_nothing_are_compared() -> None:
    lse = torch.tensor([[-torch.inf, 2.0], [torch.nan, 1.0]])
    right = soak._finite(torch.tensor([[-torch.inf, 2.0], [3.0, 1.0]]))
    assert right.tolist() == [[0, 2], [3, 1]] and not soak.difference((right,), (right,))
    assert not soak.difference((soak._finite(lse),), (right,)) < 1e9


def test_a_run_of_few_iterations_ends_with_them() -> None:
    one = object.__new__(soak.Soak)
    one.args, one.device = soak.parser().parse_args(["--iterations", "5"]), torch.device("cpu")
    one.memory, steps = [], []
    one.step = steps.append
    one.run()
    assert steps == [0, 1, 2, 3, 4] and one.memory[-1]["iterations"] == 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--seconds", "-1"), "must be a number above 0, got -1"),
        (("--iterations", "0"), "must be a whole number of 1 or more, got 0"),
        (("--tokens", "16"), "must be a whole number of 17 or more, got 16"),
        (("--ranks", "0"), "must be a whole number of 1 or more, got 0"),
        (("--record", "no_such_folder/x.json"), "a folder that exists, got no_such_folder/x.json"),
    ],
)
def test_arguments_are_checked_before_the_run(
    words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.multiprocessing, "spawn", lambda *_, **__: pytest.fail("it ran"))
    with pytest.raises(UsageError, match=said):
        soak.main(["--device", "cpu", *words])


def test_growth_is_that_of_the_second_half() -> None:
    warm = [{"process": x} for x in (10.0, 100.0, 100.0, 100.0, 100.0, 100.0, 100.0, 100.0)]
    assert soak.growth(warm, "process") == 0
    leak = [{"process": 100.0 + 8 * i} for i in range(40)]
    assert soak.growth(leak, "process") == 8 * 20


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("more", [[], ["--one-gpu"]])
def test_ranks_need_their_gpus(more: list[str]) -> None:
    with pytest.raises(UsageError, match="2 ranks need a GPU each, or one with --one-gpu, got 0"):
        soak.main(["--ranks", "2", *more])
