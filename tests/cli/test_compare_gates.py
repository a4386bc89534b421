"""compare --noise: each gate fails alone, and says so when it has nothing to judge."""

from typing import Any

import numpy as np
import pytest

from tests.cli.command import Capture, run
from tests.cli.compare_runs import (
    ODD,
    ONE_STEP,
    PARAMETERS,
    SIGNS,
    STEPS,
    Write,
    failed,
    judge,
)


def test_a_right_run_passes_every_gate(
    capsys: Capture, family: tuple[str, str], write: Write
) -> None:
    right = write("magi", ODD, gradients={PARAMETERS[1]: ONE_STEP, PARAMETERS[0]: 0.2})
    code, facts = judge(capsys, family, right)
    assert (code, facts["passed"], failed(facts)) == (0, True, [])
    assert [g for g in facts["gates"].values() if g["passed"] is None] == []
    assert facts["gates"]["gradients"]["value"] == pytest.approx(2.0, rel=1e-5)
    assert facts["gradient_floor"] == ONE_STEP and facts["thresholds"]["noise_ratio"] == 2


def at_the_end(size: float) -> Any:
    """Too high in the last 20 steps and too low in 20 before the last 50: right in the mean."""
    steps = np.arange(STEPS)
    return ODD + size * (steps >= STEPS - 20) - size * ((steps >= 30) & (steps < 50))


@pytest.mark.parametrize(
    "gate, options",
    [
        ("step_1_loss", {"difference": np.where(np.arange(STEPS) == 0, 2e-4, ODD)}),
        ("gradients", {"gradients": {PARAMETERS[2]: 3.1 * ONE_STEP}}),
        ("gradients", {"gradients": {PARAMETERS[0]: 0.31}}),
        # Up and down by turns: a large difference without a bias.
        ("mean_loss", {"difference": np.where(np.arange(STEPS) == 0, 0, 3e-4 * SIGNS)}),
        # Always up and less than the noise's size: a bias without a large difference.
        ("mean_bias", {"difference": np.where(np.arange(STEPS) < 70, 9e-5, ODD)}),
        ("last_steps", {"difference": at_the_end(1.5e-4)}),
        ("validation", {"validation": 3e-4}),
        ("loss_start", {"vocab_size": 640}),
        ("loss_start", {"hidden_size": 3072}),  # 0.6 nats more from the logits' variance
    ],
    ids=["step_1", "one_rounding_step", "3x_noise", "size", "bias", "end", "validation", "start",
         "start_of_wide_model"],
)  # fmt: skip
def test_each_gate_fails_alone(
    capsys: Capture,
    family: tuple[str, str],
    write: Write,
    gate: str,
    options: dict[str, Any],
) -> None:
    wrong = write("wrong", **{"difference": ODD, "gradients": 0.0} | options)
    code, facts = judge(capsys, family, wrong)
    assert (code, facts["passed"], failed(facts)) == (1, False, [gate])
    assert facts["gates"][gate]["ratio"] > 1
    assert run(capsys, "compare", family[0], str(wrong), "--noise", family[1], "-q", "--no-figure",
               "--loss-drop", "4.9")[1] == "FAIL wrong\n"  # fmt: skip


@pytest.mark.parametrize("bad", ["nan", "inf"])
@pytest.mark.parametrize("where", ["loss", "gradient", "validation"])
def test_inf_and_nan_fail(
    capsys: Capture, family: tuple[str, str], write: Write, bad: str, where: str
) -> None:
    difference, gradients, validation = ODD.copy(), {PARAMETERS[0]: 0.0}, 0.0
    if where == "loss":
        difference[30] = float(bad)
    elif where == "gradient":
        gradients[PARAMETERS[2]] = float(bad)
    else:
        validation = float(bad)
    wrong = write("wrong", difference, gradients, validation=validation)
    code, facts = judge(capsys, family, wrong)
    assert code == 1 and "finite" in failed(facts)
    other = {"loss": "mean_loss", "gradient": "gradients", "validation": "validation"}[where]
    assert other in failed(facts)
    assert facts["gates"][other]["value"] is None  # JSON has no nan
