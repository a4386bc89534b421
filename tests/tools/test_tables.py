"""Tables of pages from rows that were made up: lines, training steps, attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.changed_arguments import MASK_FLAG
from tools.docs_text import fill_tables
from tools.record_table import Row, markdown, pivot
from tools.table_attention import (
    deterministic_rows,
    distributed_rows,
    head_size_rows,
    kernel_rows,
    te_rows,
)
from tools.table_steps import flag_rows, packed_rows, whole_rows
from tools.tables import TABLES

ROOT = Path(__file__).parents[2]


def test_a_missing_key_is_a_dash() -> None:
    line = "`{mask}` | {a[x]:.0f} / {b[x]:.0f}"
    rows: list[Row] = [{"mask": "full", "a": {"x": 1}}, {"mask": "causal"}]
    lines = ["| mask | a / b |", "|---|---|", "| `full` | 1 / - |", "| `causal` | - |"]
    assert markdown("mask | a / b", line, rows) == lines


def test_rows_of_equal_keys_become_one() -> None:
    rows = [{"mask": "full", "impl": impl, "direction": "fwd"} for impl in ("ours", "ring")]
    (row,) = pivot(rows, "mask", "impl direction")
    assert row == {"mask": "full", "ours_fwd": rows[0], "ring_fwd": rows[1]}


def test_a_mark_of_no_table_is_an_error() -> None:
    text = "a\n<!-- record index -->\nold\n<!-- end -->\nb"
    assert fill_tables(text, {"index": lambda: ["new"]}, "record") == text.replace("old", "new")
    with pytest.raises(KeyError, match="index"):
        fill_tables(text, {}, "record")


def test_every_table_is_on_a_page() -> None:
    root = Path(__file__).parents[2]
    pages = [root / "README.md", root / "benchmarks/records/README.md", *root.glob("docs/**/*.md")]
    text = "".join(page.read_text() for page in pages)
    assert not [name for name in TABLES if f"<!-- record {name} -->" not in text]


def step(case: str, ms: float, **more: Any) -> Row:
    """A run whose first steps are slow."""
    times = [9e3] * 3 + [ms] * 5
    return {"case": case, "flags": [MASK_FLAG], "ms": times, "memory": ["1", "2048"], **more}


def test_runs_of_one_case_have_their_median() -> None:
    rows = [step("magi sft 1b 8192", ms) for ms in (100, 130, 110)]
    rows += [
        step(f"stock sft {way} 1b 8192", ms) for way, ms in (("fa3 p2p", 120), ("fa3 a2a", 99))
    ]
    slow = step("stock sft cudnn p2p 1b 8192", 1, flags=[])
    (row,) = packed_rows({"rows": [*rows, slow, step("magi 1b 8192", 5)]})
    assert row["magi"] == "110 (100 to 130)" and row["length"] == 8192
    assert row["ways"] == "fa3 a2a 99; fa3 p2p 120", "a run with a data loader's mask is left out"
    assert row["over"] == pytest.approx(99 / 110)


def test_whole_steps_have_all_runs_of_all_days() -> None:
    stock = [step("stock cp2 fa3 p2p 1b 8192", 120), step("stock fp8 cp2 fa3 p2p 1b 8192", 1)]
    magi = [step("magi cp2 1b 8192", ms) for ms in (90, 100, 130)]
    (row,) = whole_rows(
        {"rows": [*stock, magi[0], step("magi cp2 1b 4096", 1)]}, {"rows": magi[1:]}
    )
    assert (row["runs"], row["layout"], row["over"]) == (3, "cp2", 1.2)
    assert (row["magi"], row["first"]) == ("100 (90 to 130)", "9.0 / 9.0")
    assert row["peak"] == "2,048 / 2,048"


def test_a_job_is_compared_with_stock_of_its_name() -> None:
    losses = {"magi cp2": 1.1, "stock cp2": 1.0, "magi cp2 documents": 2.0, "magi odd": 3.0}
    rows = [{"case": case, "loss": [loss] * 20} for case, loss in losses.items()]
    same, documents, odd = flag_rows({"rows": rows})
    assert same["peer"] == "stock cp2" and same["apart"][0] == pytest.approx(0.1)
    assert "peer" not in documents and "peer" not in odd


def attention(impl: str, ms: float, mask: str = "causal", **more: Any) -> list[Row]:
    where = {"mask": mask, "ranks": 2, "tokens": 4096, "host_ms": 1.0, "impl": impl, "ms": ms}
    return [where | {"direction": direction} | more for direction in ("fwd", "bwd")]


def test_attention_is_compared_within_a_program() -> None:
    flash = {"rows": attention("ours", 10) + attention("te_fa3_a2a", 13, host_ms=6.0)}
    fused = {"rows": attention("ours", 8) + attention("te_cudnn_p2p", 12)}
    (row,) = te_rows("fa3_4096_2", "cudnn_4096_2", "fa3_8192_2")(flash, fused)
    assert (row["fa3_4096_2"], row["cudnn_4096_2"]) == ("1.30x, a2a *", "1.50x, p2p")
    assert row["fa3_8192_2"] == "-"


def test_packs_of_one_kind_are_one_row() -> None:
    times = {"d1:0": 12, "d1:1": 14, "d1:2": 20}
    rows = [row for mask in times for row in attention("ours", 10, mask)]
    rows += [row for mask, ms in times.items() for row in attention("te_fa3_p2p", ms, mask)]
    (row,) = te_rows("fa3_4096_2")({"rows": rows})
    assert row["fa3_4096_2"] == "1.40x (1.20 to 2.00), p2p" and row["mask"] == "d1"


def test_distributed_rows_are_those_that_magi_was_timed_on() -> None:
    rows = [
        {"tokens": 1024, "received_rows": [0], "mask": mask, "ranks": ranks, "impl": impl,
         "direction": direction}
        for ranks, impl in ((1, "ours"), (2, "ring"))
        for mask in ("full", "d1:0")
        for direction in ("fwd", "bwd")
    ]  # fmt: skip
    (row,) = distributed_rows({"rows": rows})
    assert (row["mask"], row["tokens"], row["received"]) == ("full", 1024, 0)


def test_head_sizes_stand_next_to_the_faster_flash_attention() -> None:
    speeds = {"ours": 600.0, "fa3": 500.0, "fa4": 400.0}
    rows = [
        {"head_dim": 192, "mask": "full", "direction": way, "seqlen": n, "impl": impl, "tflops": x}
        for way, more in (("fwd", 0), ("bwd", 300))
        for n in (4096, 16384)
        for impl, x in {**speeds, "fa4": speeds["fa4"] + more}.items()
    ]
    (found,) = head_size_rows({"rows": rows})
    assert found["name"] == "192, values 128"
    assert found["both_4096"] == found["both_16384"] == "600 / 600 (1.20 / 0.86)"


def test_deterministic_backwards_are_shares_of_the_fast_one() -> None:
    row = {"mask": "full", "seqlen": 4096, "impl": "ours_deterministic", "ratio": 1.25}
    (found,) = deterministic_rows({"rows": [row]})
    assert found["4096_ours_deterministic"] == "0.80"


def test_readme_has_the_count_of_published_jobs() -> None:
    jobs, accepted = (cell.strip() for cell in sets_row("all").split("|")[3:5])
    said = f"{jobs} published jobs, [{accepted.split()[0]} pass]"
    assert said in (ROOT / "README.md").read_text()


def sets_row(name: str) -> str:
    """The line of a set in the table of published jobs."""
    return next(line for line in TABLES["published jobs"]() if line.startswith(f"| {name} |"))


def test_a_cell_of_the_kernel_is_from_its_newest_record() -> None:
    def record(day: str, **tflops: float) -> dict[str, Any]:
        where = {"mask": "full", "seqlen": 4096, "direction": "fwd"}
        rows = [where | {"impl": impl, "tflops": speed} for impl, speed in tflops.items()]
        return {"file": Path(f"kernel_{day}.json"), "rows": rows}

    old = record("2026-01-01", ours=700, cudnn=600, fa3=500)
    new, alone = record("2026-01-02", ours=720, fa3=680), record("2026-01-02_b", ours=1)
    (row,) = kernel_rows(old, new, alone)
    assert row["fwd_4096"]["over"] == "720 (1.06x fa3)" and "cudnn" not in row["fwd_4096"]
    (row,) = kernel_rows(alone)
    assert row["fwd_4096"]["over"] == "1"
