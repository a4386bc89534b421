"""`--inprocess-restart` of Megatron's own pretrain script on two GPUs with TransformerEngine.

`pytest -m te tests/te/test_restart.py --megatron-checkout PATH`, with nvidia_resiliency_ext beside
what test_pretrain.py needs. In deterministic mode, so that a step that is repeated has equal bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.train.pretrain_cases import MAGI, SMALL
from benchmarks.train.pretrain_te import CP2, DETERMINISTIC, REPEATABLE, TE
from tests.launcher.layouts import BY_EOD, TP2_SP
from tests.launcher.restarted_steps import (
    JOB,
    SAVED,
    assert_one_restart,
    assert_restarted,
    steps_of,
)
from tests.launcher.two_ranks import Ranks

pytestmark = [
    pytest.mark.te,
    pytest.mark.multi_gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
OF_STOCK = 2e-3
"""Relative, of a step's loss, as in test_pretrain.py."""
LAYOUTS: dict[str, dict[str, Any]] = {"cp2": CP2, "documents tp2": {**TP2_SP, **BY_EOD}}
RESTART: dict[str, Any] = {"inprocess-restart": True, "inprocess-granularity": "rank"}


def start(megatron: Path, how: str, folder: Path, flags: dict[str, Any]) -> Ranks:
    """Two ranks that save after every second of six steps."""
    paths = {"save": str(folder / "saved"), "load": str(folder / "saved"), "save-interval": SAVED}
    given = {**TE, **SMALL, "split": None, "mock-data": True, "train-iters": 6, **paths, **flags}
    environment = {**REPEATABLE, "PYTHONPATH": str(megatron), "TORCH_CPP_LOG_LEVEL": "error"}
    program = (JOB, how, str(megatron / "pretrain_gpt.py"))
    return Ranks(given, program, environment, timeout_s=150, folder=folder)


def runs_of(layout: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """(How the job runs, its flags), by name."""
    ours = {**LAYOUTS[layout], **MAGI, **DETERMINISTIC}
    runs = {"magi": ("whole", ours), "restarted": ("nvrx", {**ours, **RESTART})}
    if layout == "cp2":
        runs["stock"] = ("whole", LAYOUTS[layout])
    return runs


@pytest.fixture(scope="module")
def outputs(
    megatron_checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], list[str]]:
    """What the ranks of every run printed, by layout and run; the runs share the GPUs."""
    pytest.importorskip("nvidia_resiliency_ext.inprocess")
    started = {
        (layout, run): start(megatron_checkout, how, tmp_path_factory.mktemp("run"), flags)
        for layout in LAYOUTS
        for run, (how, flags) in runs_of(layout).items()
    }
    try:
        return {name: ranks.outputs() for name, ranks in started.items()}
    finally:
        for ranks in started.values():
            ranks.kill()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_restarted_run_repeats_every_bit(
    outputs: dict[tuple[str, str], list[str]], layout: str
) -> None:
    whole = steps_of(outputs[layout, "magi"][-1])
    assert len(whole) == 6
    restarted = outputs[layout, "restarted"]
    assert_one_restart(restarted)
    assert "--magi-transport all_to_all is set" in restarted[0]
    assert_restarted(restarted, whole)


def test_its_losses_are_those_of_stock_megatron(
    outputs: dict[tuple[str, str], list[str]],
) -> None:
    stock, restarted = (losses(outputs["cp2", run][-1]) for run in ("stock", "restarted"))
    assert sorted(stock) == sorted(restarted)
    assert restarted == pytest.approx(stock, rel=OF_STOCK)


def losses(output: str) -> dict[int, float]:
    """By iteration; of a repeated one the last."""
    return {iteration: loss for iteration, loss, _ in steps_of(output)}
