"""plan --measure: kernel times of every rank beside the prediction."""

from __future__ import annotations

import pytest
import torch

from tests.cli.command import Capture, plan_json, run

SMALL = ("--lengths", "300,212", "--cp", "2", "--heads", "4,2,16", "--measure")


def test_every_rank_has_predicted_and_measured_times(capsys: Capture) -> None:
    ranks = plan_json(capsys, *SMALL)["kernels"]["ranks"]
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["forward_us"] > 0 and rank["backward_us"] > 0
        assert 0 < rank["predicted_forward_us"] < rank["predicted_backward_us"]


def test_the_report_has_them_on_request_alone(capsys: Capture) -> None:
    code, out, _ = run(capsys, "plan", *SMALL)
    table = out[out.index("kernels of each rank on ") :].splitlines()
    assert code == 0 and len(table) == 4 and table[2].split()[0] == "0"
    _, out, _ = run(capsys, "plan", *SMALL[:-1])
    assert "kernels of each rank" not in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU measures larger masks")
@pytest.mark.parametrize(
    "mask",
    [
        ("--lengths", "65536"),
        ("--lengths", "1000000", "--window", "1"),  # few cells, but many rows
        ("--lengths", "1", "--total", "100000000"),
    ],
)
def test_large_masks_need_a_gpu(capsys: Capture, mask: tuple[str, ...]) -> None:
    code, _, err = run(capsys, "plan", *mask, "--cp", "2", "--measure")
    assert code == 2 and "--measure requires a GPU" in err
