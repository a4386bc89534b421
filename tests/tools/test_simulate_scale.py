"""The scale model: how far it is off on two GPUs, what it counts, and its record."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_magi import HeadShape, MagiConfig, masks
from megatron_magi.config import CostTable
from megatron_magi.core.plan import make_attn_plan
from tools import simulate_scale as script

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks/records/dist_h200_2026-11-22_2gpus.json"
SIMULATED = ROOT / "benchmarks/records/simulate_scale_cpu_2026-11-23.json"


def test_two_gpus_are_modelled_within_ten_percent() -> None:
    rows = script.validate(json.loads(RECORD.read_text()))
    assert len(rows) == 10 and {row["direction"] for row in rows} == {"fwd", "bwd"}
    assert max(abs(row["miss"]) for row in rows) <= 0.10
    assert json.loads(SIMULATED.read_text())["validation"] == rows


def test_rows_of_one_exchange_count_on_every_link_they_take() -> None:
    """A full mask, 16 ranks of 64 rows, 4 a node: every rank sends to 15 and receives from 15."""
    table = CostTable(ranks_per_node=4, link_gib_s=200.0, node_link_gib_s=50.0)
    heads = HeadShape(8, 2, 64)
    flat = make_attn_plan(masks.full(1024), 16, heads, MagiConfig(chunk_size=64, costs=table))
    rows, crossing = script.link_rows(flat, 4, once=False)
    assert crossing == 16 * 12 * 64 and rows.tolist() == [12 * 64 * 4] * 16
    rows, crossing = script.link_rows(flat, 4, once=True)
    assert crossing == 16 * 3 * 64 and rows.tolist() == [max(12 * 64, 3 * 64 * 4)] * 16
    rows, crossing = script.link_rows(flat, 16, once=False)
    assert crossing == 0 and rows.tolist() == [15 * 64] * 16


def test_nodes_are_ahead_and_the_record_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "COSTS", CostTable(ranks_per_node=4))
    out = tmp_path / "sim.json"
    words = ["--cp", "4,16", "--tokens", "2048", "--packs", "1"]
    assert script.main([*words, "--record", str(RECORD), "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(r["cp_size"], r["plan"]) for r in rows] == [
        (cp, plan) for cp in (4, 16) for plan in ("lpt_2048", "flat", "nodes")
    ]
    one_node, several = {r["plan"]: r for r in rows[:3]}, {r["plan"]: r for r in rows[3:]}
    assert all(row["crossing_own"] == 0 for row in one_node.values())
    assert one_node["nodes"]["efficiency"] == 1.0
    assert several["nodes"]["crossing_own"] < several["flat"]["crossing_own"]
    assert several["nodes"]["tflops"] >= several["flat"]["tflops"]
    for row in rows:
        assert 0 < row["of_kernels"] <= 1.02, row
    assert "cp   16" in capsys.readouterr().out


def test_nodes_keep_their_rate_up_to_64_gpus() -> None:
    record = json.loads(SIMULATED.read_text())
    at_64 = [r for r in record["rows"] if r["cp_size"] == 64 and r["plan"] == "nodes"]
    assert len(at_64) == 3 and min(row["efficiency"] for row in at_64) >= 0.9
    assert np.isfinite([row["tflops"] for row in record["rows"]]).all()
