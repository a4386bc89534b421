"""The distributed benchmark on gloo: it runs, its figures fit, and it notices errors."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_magi.cli.parser import UsageError

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import bench_dist_attn

    return bench_dist_attn


def test_two_ranks_on_the_cpu(tmp_path: Path) -> None:
    impls = ["ours", "ours0", "narrow", "kernels", "all_gather", "one_gpu"]
    command = [sys.executable, SCRIPTS / "bench_dist_attn.py", "--device", "cpu", "--ranks", "2"]
    command += ["--tokens", "48", "--masks", "packed_causal,swa1024", "--impls", ",".join(impls)]
    command += ["--heads", "4,2", "--head-dim", "8", "--rounds", "2"]
    done = subprocess.run(
        [*command, "--record", tmp_path / "dist.json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "dist.json").read_text())
    rows = {(r["mask"], r["impl"], r["direction"]): r for r in record["rows"]}
    assert set(rows) == {
        (m, i, d) for m in ("packed_causal", "swa1024") for i in impls for d in ("fwd", "bwd")
    }
    for row in rows.values():
        assert 0 < row["min_ms"] <= row["ms"] <= row["max_ms"] and row["n"] == 2
    ours = rows["packed_causal", "ours", "fwd"]
    assert len(ours["received_rows"]) == 2 and max(ours["received_rows"]) <= 48
    assert record["meta"]["date"] and "--masks packed_causal" in record["meta"]["command"]


class Fixed:
    def __init__(self, *full: torch.Tensor) -> None:
        self._full = full or None

    def full(self) -> tuple[torch.Tensor, ...] | None:
        return self._full


def test_other_results_are_named(bench: SimpleNamespace) -> None:
    x = torch.randn(8, 2, 4)
    made = {
        "ours": Fixed(x, x), "kernels": Fixed(), "close": Fixed(x, x * 1.001),
        "far": Fixed(x, x.flip(0)), "nan": Fixed(x, x / 0 * 0),
    }  # fmt: skip
    wrong = list(bench.disagreements(made))
    assert [line.split()[0] for line in wrong] == ["far", "nan"]


@pytest.mark.parametrize("option", ["--masks", "--impls"])
def test_unknown_names_are_refused_before_ranks_start(option: str, bench: SimpleNamespace) -> None:
    with pytest.raises(UsageError, match=f"{option} takes"):
        bench.main([option, "ours,full", "--device", "cpu"])


def test_too_few_gpus_are_refused(
    bench: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["--ranks", "99"]) == 2
    assert "99 GPUs are needed" in capsys.readouterr().err
