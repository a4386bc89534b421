"""The table of training steps beside TransformerEngine, of runs that were made up."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_magi import HeadShape
from megatron_magi.launcher.changed_arguments import MASK_FLAG
from tools import readme_te

SHAPE = {"num-layers": 2, "hidden-size": 64, "ffn-hidden-size": 128, "num-attention-heads": 4}
BATCH = {"num-query-groups": 2, "global-batch-size": 4, "vocab-size": 127}


def row(case: str, ms: float) -> dict[str, Any]:
    """A run whose first steps are slow."""
    flags = [word for name, value in (SHAPE | BATCH).items() for word in (f"--{name}", str(value))]
    flags.append(MASK_FLAG)
    return {"case": f"{case} 1b 8192", "gpus": 2, "flags": flags, "ms": [9e3] * 3 + [ms] * 5}


def cells(rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Run, time and ratio of every line, without the lines above and below."""
    monkeypatch.setattr(readme_te, "newest", lambda kind: {"rows": rows})
    monkeypatch.setattr(readme_te, "source", lambda record: "")
    lines = readme_te.step_table().splitlines()[2:-1]
    words = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [[each[2], each[4], each[6]] for each in words if len(each) == 7]


def test_runs_of_one_case_are_one_line_with_their_median(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [row("magi", ms) for ms in (100, 130, 110)]
    runs += [row("stock fa3 p2p", 120), row("stock fa3 p2p", 124), row("stock fa3 a2a", 200)]
    assert cells(runs, monkeypatch) == [
        ["`stock fa3 a2a`", "200", "-"],
        ["`stock fa3 p2p`", "122 (120 to 124; 2 runs)", "-"],
        ["`magi`", "110 (100 to 130; 3 runs)", "1.11x"],
    ]


def test_a_run_is_compared_with_stock_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [row("magi fp8", 100), row("stock fp8 cudnn p2p", 150), row("stock fa3 p2p", 110)]
    assert ["`magi fp8`", "100", "1.50x"] in cells(runs, monkeypatch)
    assert cells([row("magi", 100)], monkeypatch) == [["`magi`", "100", "-"]]


def test_stock_with_a_mask_of_its_data_loader_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = row("stock fa3 p2p", 300)
    slow["flags"].remove(MASK_FLAG)
    assert cells([row("magi", 100), slow], monkeypatch) == [["`magi`", "100", "-"]]


def test_a_layout_is_compared_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [row("magi cp4", 100), row("stock cp4 fa3 p2p", 110), row("stock tp4 fa3 alone", 90)]
    assert ["`magi cp4`", "100", "1.10x"] in cells(runs, monkeypatch)


def test_first_steps_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    cells([runs := row("magi", 100), {**runs, "ms": [2e4, *runs["ms"][1:]]}], monkeypatch)
    assert "| `magi` | 9,000 to 20,000 |" in readme_te.step_table()


def test_equal_times_come_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"stock fa3 {way}" for way in ("a2a", "all_gather", "p2p")]
    lines = cells([row(name, 100) for name in reversed(names)], monkeypatch)
    assert [line[0] for line in lines] == [f"`{name}`" for name in names]


def test_a_run_that_ended_early_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [row("magi", 100), row("stock fa3 p2p", 120) | {"error": "out of memory"}]
    assert [line[1] for line in cells(runs, monkeypatch)] == ["120 *", "100"]
    assert "*: it ended before its last step" in readme_te.step_table()


def attention(impl: str, ms: float, **shape: Any) -> dict[str, Any]:
    where = {"mask": "causal", "ranks": 2, "tokens": 4096, "host_ms": 1.0}
    return {**where, "impl": impl, "ms": ms, **shape}


def test_attention_is_compared_within_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"heads": [32, 8], "head_dim": 64}
    rows = [attention("ours", 10), attention("te_fa3_p2p", 13)]
    rows += [attention("ours", 2, **small), attention("te_fa3_a2a", 4, **small)]
    monkeypatch.setattr(readme_te, "newest", lambda kind: {"rows": rows})
    monkeypatch.setattr(readme_te, "source", lambda record: "")
    assert "| 1.30x, p2p | 1.30x, p2p |" in readme_te.attention_table()
    assert "| 2.00x, a2a | 2.00x, a2a |" in readme_te.attention_table(HeadShape(32, 8, 64))
