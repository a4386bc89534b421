"""The estimate of waiting: 1F1B by hand, what the record holds, and the page that shows it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.planner import step_balance as script
from megatron_magi.cli.parser import UsageError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
RECORD = ROOT / "benchmarks/records/step_balance_cpu_2026-11-23.json"


@pytest.mark.parametrize(("pp", "count"), [(1, 3), (2, 2), (2, 8), (4, 8), (4, 3)])
def test_equal_microbatches_have_the_usual_bubble(pp: int, count: int) -> None:
    """Every stage idles for pp - 1 microbatches' shares."""
    times = np.tile([120, 240], (count, 1))
    assert script.pipeline_ns(times, pp) == 360 / pp * (count + pp - 1)
    layout = script.Layout(1, pp, count)
    assert script.equal_ns(times, layout) == pytest.approx(script.pipeline_ns(times, pp))


def test_a_long_microbatch_is_waited_for() -> None:
    """Two stages, forward and backward of 1 each, and of 3 for one microbatch, by hand.

    Last: stage 1 has forwards at 1-2 and, after stage 0's at 1-4, at 4-7; backwards 2-3 and 7-10;
    stage 0 has backwards at 4-5 and 10-13. First: 3-6, 6-9, 9-10, 10-11 and 9-12, 12-13."""
    short, long = [2, 2], [6, 6]
    assert script.pipeline_ns(np.array([short, long]), 2) == 13
    assert script.pipeline_ns(np.array([long, short]), 2) == 13
    assert script.pipeline_ns(np.array([short, long, short]), 2) < script.pipeline_ns(
        np.array([long, short, long]), 2
    )


def test_calls_of_a_stage_alternate_after_the_warm_up() -> None:
    calls = [f"{kind[0]}{number}" for kind, number in script.one_f_one_b(4, 2)]
    assert calls == ["f0", "f1", "f2", "b0", "f3", "b1", "b2", "b3"]
    assert len(list(script.one_f_one_b(2, 5))) == 4


@pytest.mark.parametrize("steps", ["0", "10", "-16", "24"])
def test_steps_that_no_group_divides_are_refused(steps: str) -> None:
    with pytest.raises(UsageError, match=f"16 or more, a multiple of 16, got {steps};"):
        script.main(["--steps", steps])


def test_a_short_run_writes_what_it_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "balance.json"
    assert script.main(["--steps", "16", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert rows == [json.loads(line) for line in capsys.readouterr().out.splitlines()[:-1]]
    groups = [rows[i : i + 4] for i in range(0, len(rows), 4)]
    assert len(groups) == 18
    for sampler, *planned in groups:
        assert [row["balance_steps"] for row in planned] == [1, 4, 16]
        times = [row["over_equal"] for row in (sampler, *planned)]
        assert times == sorted(times, reverse=True)
        assert sampler["moved_steps"] == planned[0]["moved_steps"] == 0 < planned[1]["moved_steps"]


def test_the_page_shows_the_record() -> None:
    record = json.loads(RECORD.read_text())
    page = (ROOT / "docs/trainer/training.md").read_text()
    assert script.table(record) in page
    of_page = {
        row["balance_steps"]: f"{row['step_spread']:.0%}".replace("%", " %")
        for row in record["rows"]
        if (row["distribution"], row["dp"], row["pp"], row["microbatches"]) == ("magi", 8, 1, 4)
    }
    assert of_page[None] == of_page[1]
    assert (
        f"deviation of {of_page[None]} of their mean in the sampler's order and with 1, of "
        f"{of_page[4]} with 4, and of {of_page[16]} with 16"
    ) in page
    least, most = np.array([row["pack_s"] for row in record["rows"]])[:, [1, 4]].T
    assert (most / least).max() > 3
