"""plan --layouts: prices of divisions for a data file, and the recommendation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_magi import HeadShape
from megatron_magi.cli.layouts import Model
from tests.cli.command import Capture, run
from tests.data_files import write_documents

SHAPE = ["--model", "4,512,512,512", "--steps", "4"]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One with documents of very different lengths, and one whose documents are all short."""
    pytest.importorskip("megatron.core")
    import megatron_magi.adapter  # noqa: F401  prepares the import of Megatron

    folder = tmp_path_factory.mktemp("corpora")
    lengths = {"mixed": [8000, *[40] * 400] * 20, "short": [500] * 500}
    return {name: write_documents(folder / name, each) for name, each in lengths.items()}


def layouts(capsys: Capture, prefix: str, *options: str) -> tuple[int, str, str]:
    given = ["plan", "--layouts", "--data", prefix, "--seq-length", "8192", *SHAPE, *options]
    return run(capsys, *given)


def test_groups_are_recommended_where_documents_differ(
    capsys: Capture, corpora: dict[str, str]
) -> None:
    code, out, _ = layouts(capsys, corpora["mixed"], "--gpus", "4")
    lines = out.splitlines()
    assert code == 0 and lines[0].startswith(
        "job       4 GPUs in hosts of 8, tp 1, pp 1; 4 samples"
    )
    shown = [line.split("  ")[0] for line in lines[4:]]
    assert {"DP 4", "DP 2 x CP 2, dealt", "DP 1 x CP 4, 4 joined", "ideal"} <= {*shown}
    assert lines[-1].startswith("recommended: DP 1 x CP 4, 4 joined (1.")
    assert lines[-1].endswith("x over DP 4): --context-parallel-size 4 --micro-batch-size 4")
    code, out, _ = layouts(capsys, corpora["mixed"], "--gpus", "4", "--json")
    facts = json.loads(out)
    by_name = {each["name"]: each for each in facts["layouts"]}
    assert facts["recommended"] == "DP 1 x CP 4, 4 joined"
    assert by_name["DP 4"]["over_ideal"] > by_name["DP 2 x CP 2, dealt"]["over_ideal"] > 1.0
    assert by_name["DP 1 x CP 4"]["exchange"] > by_name["DP 1 x CP 4, 4 joined"]["exchange"] > 0


def test_equal_samples_have_nothing_to_gain(capsys: Capture, corpora: dict[str, str]) -> None:
    code, out, _ = layouts(capsys, corpora["short"], "--gpus", "4", "-q")
    assert (code, out.count("\n")) == (0, 1) and out.startswith("nothing to gain: data parallelism")


def test_memory_decides_what_is_recomputed(capsys: Capture, corpora: dict[str, str]) -> None:
    _, out, _ = layouts(capsys, corpora["mixed"], "--gpus", "4", "--memory", "0.5", "--json")
    recomputed = {each["name"]: each["recomputed"] for each in json.loads(out)["layouts"]}
    assert recomputed["DP 4"] and not recomputed["DP 1 x CP 4"]
    assert recomputed["DP 1 x CP 4, 4 joined"], "four samples on four ranks are a sample on each"


def test_the_price_of_a_sample() -> None:
    """One document in one tile, one layer: the flops of 14 products of a tile, and of weights."""
    model, heads = Model(1, 8, 16, 32), HeadShape(2, 1, 4)
    weights = 8 * (2 + 1) * 8 + 3 * 8 * 16 + 8 * 32
    attention = 14 * 128 * 128 * 2 * 4
    found = model.sample_seconds([128], heads)
    assert found == pytest.approx(attention / 640e12 + 6 * 128 * weights / 545e12)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "--data PREFIX, --seq-length N and --gpus N, got no --gpus; add"),
        (["--gpus", "6", "--tp", "4"], "--gpus must be a multiple of 4 (--tp x --pp), got 6"),
        (["--gpus", "4", "--batch", "0.5"], "invalid int value: '0.5'"),
        (["--gpus", "4", "--gpus-per-node", "1", "--batch", "3"], "of 4 ranks, got 3"),
        (["--gpus", "4", "--heads", "1"], "--heads must be three numbers Q,KV,DIM, got '1'"),
        (["--gpus", "4", "--seq-length", "999999"], "must hold a sample of 999,999 tokens"),
    ],
)
def test_what_does_not_fit_is_one_line(
    options: list[str], text: str, capsys: Capture, corpora: dict[str, Any]
) -> None:
    code, _, err = layouts(capsys, corpora["mixed"], *options)
    assert code == 2 and text in err and err.count("\n") <= 2


def test_a_file_that_is_not_there(capsys: Capture, tmp_path: Path) -> None:
    code, _, err = layouts(capsys, f"{tmp_path}/none", "--gpus", "4")
    assert code == 2 and "prefix of a .bin and an .idx file" in err
