"""Megatron's own pretrain script on two GPUs with TransformerEngine: with our flag as without it.

`pytest -m te tests/te --megatron-checkout PATH`, with TransformerEngine and a Megatron-LM source
tree whose dataset helpers are built; about ten minutes. The cases are those of
`benchmarks.train.pretrain flags`, small models in bf16 whose weights are drawn by name.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.train import pretrain_te

pytestmark = [
    pytest.mark.te,
    pytest.mark.multi_gpu,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
ROOT = Path(__file__).parents[2]
FIRST_LOSS = 2e-4
"""Relative, of the same weights: at most 9e-5 was seen (fp8 with delayed scales), 1e-5 in bf16."""
LOSSES = {"moe": 3e-2, "seq aux": 3e-2, "fp8": 1e-2}
"""Relative, over 20 steps; at most 1.7e-2, 5e-3 and 5e-3 were seen. A router's choice turns a
rounding error into another expert, and scales of fp8 that lag behind carry it on."""
OTHER_LOSSES = 2e-3
"""At most 7e-4 was seen; a boundary that is ignored makes 3e-2."""

Rows = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def rows(megatron_checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """What every case logged, by name."""
    return rows_of("flags", megatron_checkout, tmp_path_factory.mktemp("te"))


def rows_of(part: str, checkout: Path, folder: Path) -> Rows:
    """What every case of a part logged, by name."""
    record = folder / f"{part}.json"
    command = [sys.executable, "-m", "benchmarks.train.pretrain", part, "--at-once", "7"]
    command += ["--megatron", checkout, "--record", record]
    subprocess.run(command, check=True, cwd=ROOT)
    return {row["case"]: row for row in json.loads(record.read_text())["rows"]}


@pytest.fixture(scope="session")
def names() -> list[str]:
    """Of all cases."""
    return [case.name for case in pretrain_te.flag_cases()]


def test_every_case_ends_without_an_error(rows: Rows, names: list[str]) -> None:
    errors = {name: row["error"][-500:] for name, row in rows.items() if "error" in row}
    assert not errors and set(rows) == set(names)
    assert all(len(row["loss"]) >= 8 for row in rows.values())


def test_the_flag_changes_no_loss(rows: Rows) -> None:
    """Every case that stock Megatron can run too."""
    pairs = [name.removeprefix("stock ") for name in rows if name.startswith("stock ")]
    pairs = [name for name in pairs if f"magi {name}" in rows and "saves" not in name]
    assert len(pairs) > 15
    off = {name: relative(rows[f"magi {name}"], rows[f"stock {name}"]) for name in pairs}
    bounds = {name: bound(name) for name in pairs}
    assert not {name: x for name, x in off.items() if x[0] > FIRST_LOSS or max(x) > bounds[name]}


def test_graphs_that_hold_attention_change_no_bit(rows: Rows) -> None:
    eager = rows["magi cp1 deterministic eager"]
    for name in pretrain_te.ATTENTION_GRAPHS:
        graphs = rows[f"magi cp1 deterministic {name}"]
        assert (graphs["loss"], graphs["grad_norm"]) == (eager["loss"], eager["grad_norm"]), name


def test_a_delta_net_trains_as_stock(megatron_checkout: Path, tmp_path: Path) -> None:
    pytest.importorskip("fla")
    pytest.importorskip("tilelang")
    found = rows_of("delta_net", megatron_checkout, tmp_path)
    pairs = {"magi cp1 delta net": "stock cp1 delta net",
             "magi cp2 delta net": "stock cp1 delta net",
             "magi cp2 delta net documents": "magi cp1 delta net documents"}  # fmt: skip
    off = {name: max(relative(found[name], found[other])) for name, other in pairs.items()}
    assert max(off.values()) < OTHER_LOSSES, off


def test_a_layout_changes_no_loss(rows: Rows) -> None:
    """Cases that stock Megatron does not run are compared with another layout of ours. With
    documents the loss is steep at a step: 5.5e-3 was seen there."""
    pairs = {"magi pp2 documents": "magi cp1 documents", "magi cp2 documents": "magi cp1 documents",
             "magi cp2 gpt-oss": "magi cp1 gpt-oss", "magi cp2 mla": "magi cp2 mla fused",
             "magi cp2": "stock cp1"}  # fmt: skip
    off = {name: max(relative(rows[name], rows[other])) for name, other in pairs.items()}
    bounds = {name: 1e-2 if "documents" in name else OTHER_LOSSES for name in pairs}
    assert not {name: x for name, x in off.items() if x > bounds[name]}


@pytest.mark.parametrize(
    "name", ["magi cp2 loads stock", "stock cp2 loads magi", "magi cp2 loads magi"]
)
def test_a_checkpoint_goes_on_with_and_without_the_flag(rows: Rows, name: str) -> None:
    """Ours is saved while training goes on. Megatron's second line after a resume has the mean of
    two steps."""
    whole, resumed = rows["magi cp2"]["loss"], rows[name]["loss"]
    assert 2 < len(resumed) < len(whole)
    wanted = whole[-len(resumed) :]
    wanted[1] = (wanted[0] + wanted[1]) / 2
    assert resumed == pytest.approx(wanted, rel=OTHER_LOSSES)


def test_deterministic_mode_repeats_every_bit_that_is_logged(rows: Rows) -> None:
    first, second = (rows[f"magi cp2 deterministic {x}"] for x in "ab")
    assert first["loss"] == second["loss"] and first["grad_norm"] == second["grad_norm"]
    assert len(first["loss"]) == 20


def relative(got: dict[str, Any], wanted: dict[str, Any]) -> list[float]:
    """Difference of every step's loss, relative."""
    return [abs(a - b) / b for a, b in zip(got["loss"], wanted["loss"], strict=True)]


def bound(name: str) -> float:
    """Largest difference that a pair may have."""
    return next((value for part, value in LOSSES.items() if part in name), OTHER_LOSSES)
