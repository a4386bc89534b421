"""Errors and shares of gradients whose errors are known."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from benchmarks.train import gradient_shares
from benchmarks.train.gradient_gates import Judged
from tests.cli.command import Capture

SIZES = {
    "decoder.layers.0.mlp.linear_fc2.weight": (64, 32),
    "decoder.final_layernorm.weight": (64,),
}
ENGINE, LOCAL = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"


def noise(seed: int, size: float) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {n: torch.randn(shape, generator=random) * size for n, shape in SIZES.items()}


def save(folder: Path, *parts: dict[str, torch.Tensor]) -> str:
    """Megatron's file of the sum."""
    path = folder / "wgrads" / "iter_0000001"
    path.mkdir(parents=True)
    total = {name: sum(part[name] for part in parts) for name in SIZES}
    torch.save({"model_chunk0": total}, path / "mp_rank_00.pth")
    return str(folder)


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, str]:
    truth, error = noise(0, 1.0), noise(1, 0.02)
    parts = {
        "fp32": (truth,),
        "fp32_tile": (truth, error),
        "cudnn": (truth, noise(2, 0.01)),
        "fa3": (truth, noise(3, 0.0101)),
        "magi": (truth, noise(4, 0.0102)),
        "magi_tile": (truth, error, noise(5, 0.01)),
        "half": (truth, noise(6, 0.005), {n: x * 0.4 for n, x in error.items()}),
    }
    return {name: save(tmp_path / name, *given) for name, given in parts.items()}


def run(capsys: Capture, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["gradient_shares", *words])
    with pytest.raises(SystemExit) as end:
        raise SystemExit(gradient_shares.run_cli(gradient_shares.main))
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def given(runs: dict[str, str], *names: str) -> list[str]:
    words = ["--truth", runs["fp32"], "--stock", runs["cudnn"], "--also", runs["fa3"]]
    words += ["--control", f"{runs['magi_tile']}={runs['fp32_tile']}"]
    return [*words, *(word for name in names for word in ("--run", runs[name]))]


def test_a_right_run_passes_and_the_control_is_caught(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, runs: dict[str, str], tmp_path: Path
) -> None:
    record = str(tmp_path / "errors.json")
    code, out, _ = run(capsys, monkeypatch, *given(runs, "magi"), "--record", record)
    rows = {line.split(" | ")[0].strip("| "): line for line in out.splitlines()}
    assert code == 0 and rows["magi"].endswith("| PASS |"), out
    assert rows["magi_tile"].endswith("| caught |") and rows["fa3"].endswith("| stock |")
    share = float(rows["magi_tile"].split(" | ")[3])
    assert 0.9 < share < 1.1 and abs(float(rows["magi"].split(" | ")[3])) < 0.15
    assert run(capsys, monkeypatch, *given(runs), "--weights", "300", "--record", record)[0] == 0
    code, again, _ = run(capsys, monkeypatch, "--from", record)
    assert code == 0 and out.strip() in again and "Weights: 300; compared with cudnn" in again


def test_an_error_that_the_ratio_does_not_show_is_seen_by_its_share(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, runs: dict[str, str]
) -> None:
    """Its error is no larger than stock's, and four tenths of it are the control's."""
    code, out, _ = run(capsys, monkeypatch, *given(runs, "half"))
    (line,) = [x for x in out.splitlines() if x.startswith("| half")]
    assert code == 1 and line.endswith("| FAIL share of magi_tile |"), out
    assert float(line.split(" | ")[1]) < 1.05


def test_a_control_without_an_error_is_refused(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, runs: dict[str, str]
) -> None:
    words = ["--truth", runs["fp32"], "--stock", runs["cudnn"], "--control"]
    code, _, err = run(capsys, monkeypatch, *words, f"{runs['magi_tile']}={runs['fp32']}")
    assert code == 2 and "a control must have an error" in err and "fp32" in err
    code, _, err = run(capsys, monkeypatch, "--truth", runs["fp32"])
    assert code == 2 and "--truth and --stock are required" in err
    code, _, err = run(capsys, monkeypatch, *words, runs["magi_tile"])
    assert code == 2 and "--control must be RUN=TRUTH" in err


@pytest.mark.parametrize(
    "errors, share, failures",
    [
        ((1.04, 1.04, 1.24), 0.2, []),
        ((1.06, 1.06, 1.06), 0.2, ["median"]),
        ((1.0, 1.0, 1.26), 0.2, ["worst"]),
        ((1.0, 1.0, 1.0), 0.26, ["share of magi_tile"]),
        ((1.0, 1.0, 1.0), -0.26, ["share of magi_tile"]),
        ((float("nan"), 1.0, 1.0), 0.0, ["median", "worst"]),
    ],
)
def test_every_gate_can_fail(errors: tuple[float, ...], share: float, failures: list[str]) -> None:
    stock = Judged("cudnn", "stock", dict.fromkeys("abc", 1.0), {"magi_tile": 0.0})
    run = Judged("magi", "run", dict(zip("abc", errors, strict=True)), {"magi_tile": share})
    assert [*run.failures(stock)] == failures and [*stock.failures(stock)] == []
    control = Judged("magi_tile", "control", run.errors, {"magi_tile": 0.4})
    assert [*control.failures(stock)] == ["own share"]


def test_names_of_the_engine_are_those_of_local_layers(tmp_path: Path) -> None:
    path = tmp_path / "run" / "wgrads" / "iter_0000001"
    path.mkdir(parents=True)
    held = {f"decoder.layers.0.{ENGINE}": torch.ones(4)}
    torch.save({"model_chunk0": held}, path / "mp_rank_00.pth")
    assert [*gradient_shares.read(tmp_path / "run")] == [f"decoder.layers.0.{LOCAL}"]
