"""Processes that import first and get their case later."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.train import warm_ranks
from benchmarks.train.warm_ranks import Job, WarmRanks

CASE = """
import os, sys, time
open(__file__.replace("a_case.py", "a_case_runs"), "w").close()
rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
print("rank", rank, "of", world, os.environ["MASTER_PORT"], os.environ.get("GIVEN"), sys.argv[1:])
if sys.argv[1] == "fail" and rank == "1":
    sys.exit(3)
if sys.argv[1] in ("wait", "fail"):
    time.sleep(600)
"""


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WarmRanks:
    """Of ranks that have nothing to import."""
    worker = tmp_path / "worker.py"
    source = (Path(warm_ranks.__file__).with_name("warm_rank.py")).read_text()
    begin, end = source.index("IMPORTS = ("), source.index('"""What a pretrain script')
    worker.write_text(f"{source[:begin]}IMPORTS = ()\n{source[end:]}")
    monkeypatch.setattr(warm_ranks, "WORKER", (str(worker),))
    monkeypatch.setattr(warm_ranks, "AFTER_A_FAILURE_S", 3.0)
    (tmp_path / "a_case.py").write_text(CASE)
    return WarmRanks(tmp_path, {**os.environ, "PYTHONPATH": str(tmp_path)}, ahead=3)


def test_ranks_of_a_job_meet(pool: WarmRanks) -> None:
    with pool:
        outcome = pool.run(Job(2, "a_case", ["go", "--lr", "1"], {"GIVEN": "x"}), 60)
        again = pool.run(Job(1, "a_case", ["go"]), 60)
        waiting = [*pool._waiting]
    lines = outcome.output.split("\n")
    assert not outcome.failed and not again.failed
    assert [line.split()[:4] for line in lines if line] == [
        ["rank", "0", "of", "2"],
        ["rank", "1", "of", "2"],
    ]
    ports = {line.split()[4] for line in lines if line}
    assert len(ports) == 1 and "x ['go', '--lr', '1']" in lines[0]
    assert again.output.split()[:4] == ["rank", "0", "of", "1"] and "None" in again.output
    assert len(waiting) == 3 and all(rank.poll() is not None for rank in waiting)


def test_ranks_that_share_a_gpu_are_hosts_to_nccl(pool: WarmRanks, tmp_path: Path) -> None:
    (tmp_path / "a_case.py").write_text(
        "import os\nprint(*(os.environ.get(name) for name in ('LOCAL_RANK', 'NCCL_HOSTID')))\n"
    )
    with pool, WarmRanks(tmp_path, dict(os.environ), 2, one_gpu=True) as sharing:
        apart, together = (each.run(Job(2, "a_case", []), 60).output for each in (pool, sharing))
    assert apart.splitlines() == ["0 None", "", "1 None"]
    assert together.splitlines() == ["0 rank-0", "", "0 rank-1"]


def test_no_rank_starts_while_a_quiet_job_runs(pool: WarmRanks, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with pool, WarmRanks(tmp_path, environment, 3, quiet=True) as quiet:
        assert not quiet.run(Job(2, "a_case", ["go"]), 60).failed
        left = [*quiet._waiting]
        assert len(left) == 1 and left[0].stdout is not None and left[0].stdout.closed
        assert not quiet.run(Job(2, "a_case", ["go"]), 60).failed
        assert left[0] not in quiet._waiting and len(quiet._waiting) == 1


def test_jobs_of_several_threads_share_no_rank(pool: WarmRanks) -> None:
    with pool, ThreadPoolExecutor(3) as threads:
        jobs = [Job(2, "a_case", ["go", str(number)]) for number in range(5)]
        outcomes = list(threads.map(lambda job: pool.run(job, 60), jobs))
    for number, outcome in enumerate(outcomes):
        assert not outcome.failed and outcome.output.count(f"['go', '{number}']") == 2


@pytest.mark.parametrize(("word", "limit_s"), [("fail", 60), ("wait", 4.0)])
def test_a_job_that_does_not_end_is_stopped(pool: WarmRanks, word: str, limit_s: float) -> None:
    started = time.monotonic()
    with pool:
        outcome = pool.run(Job(2, "a_case", [word]), limit_s)
    assert outcome.failed and "rank 0 of 2" in outcome.output
    assert time.monotonic() - started < 30


POOL = """
import os, sys
from pathlib import Path
from benchmarks.train import warm_ranks
warm_ranks.WORKER = (sys.argv[1],)
with warm_ranks.WarmRanks(Path(), dict(os.environ), ahead=1) as pool:
    print(pool._waiting[0].pid, flush=True)
    pool.run(warm_ranks.Job(1, "a_case", ["wait"]), 600)
"""


def test_no_rank_stays_behind_a_killed_pool(pool: WarmRanks, tmp_path: Path) -> None:
    root = Path(warm_ranks.__file__).parents[2]
    variables = {**os.environ, "PYTHONPATH": f"{tmp_path}:{root}"}
    command = [sys.executable, "-c", POOL, *warm_ranks.WORKER]
    with (
        pool,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, env=variables, cwd=tmp_path, text=True
        ) as owner,
    ):
        assert owner.stdout is not None
        rank = int(owner.stdout.readline())
        _wait_until(lambda: (tmp_path / "a_case_runs").exists())
        assert _is_running(rank)
        owner.send_signal(signal.SIGKILL)
    _wait_until(lambda: not _is_running(rank))


def _wait_until(happened: Callable[[], bool]) -> None:
    """For up to half a minute."""
    deadline = time.monotonic() + 30
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert happened()


def _is_running(process: int) -> bool:
    """Whether it is there and has not ended."""
    with contextlib.suppress(FileNotFoundError):
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return False
