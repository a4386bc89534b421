"""compare --noise: what noise runs measure, and which are refused."""

import math

import numpy as np
import pytest

from tests.cli.command import Capture, run
from tests.cli.compare_runs import NOISE, ODD, ONE_STEP, PARAMETERS, STEPS, Write, failed, judge


def test_several_noise_runs_count_together(
    capsys: Capture, family: tuple[str, str], write: Write
) -> None:
    biased = write("magi", np.where(np.arange(STEPS) < 70, 9e-5, ODD), gradients=0.0)
    code, facts = judge(capsys, family, biased)
    alone = facts["gates"]["mean_bias"]
    assert (code, failed(facts)) == (1, ["mean_bias"])
    other = np.where(np.arange(STEPS) < 70, -9e-5, ODD)
    second = write("plain_sdpa", other)
    code, facts = judge(capsys, family, biased, "--noise", str(second))
    both = facts["gates"]["mean_bias"]
    assert (code, failed(facts)) == (0, [])
    assert [n["name"] for n in facts["noise"]] == ["reversed", "plain_sdpa"]
    # The second run's own scale is its bias; the limit takes the root mean square of the two.
    scales = [alone["limit"] / 2, abs(other.mean())]
    assert both["limit"] == pytest.approx(2 * float(np.sqrt(np.mean(np.square(scales)))), rel=1e-2)


def test_a_run_is_not_its_own_noise(capsys: Capture, family: tuple[str, str]) -> None:
    code, _, err = run(capsys, "compare", *family, "--noise", family[1], "--no-figure")
    assert code == 2 and "got" in err and "reversed as both" in err


def test_a_short_noise_run_measures_gradients_alone(
    capsys: Capture, family: tuple[str, str], write: Write
) -> None:
    wrong = write("magi", ODD, gradients={PARAMETERS[2]: 3.1 * ONE_STEP})
    assert failed(judge(capsys, family, wrong)[1]) == ["gradients"]
    short = write("plain_sdpa", ODD, gradients={PARAMETERS[2]: 2 * ONE_STEP}, steps=1)
    code, facts = judge(capsys, family, wrong, "--noise", str(short))
    assert (code, failed(facts)) == (0, [])
    assert "of 120 steps" in facts["gates"]["mean_loss"]["text"]
    assert facts["gates"]["gradients"]["value"] == pytest.approx(3.1 / 2, rel=1e-3)


def test_less_noise_than_one_rounding_step_is_not_believed(capsys: Capture, write: Write) -> None:
    # One bf16 rounding of 4,096 losses: 6.1e-5 of a step's mean, 5.6e-6 of a mean of 120 steps.
    family = str(write("plain")), str(write("reversed", 1e-12 * NOISE))
    assert judge(capsys, family, write("magi", 0.9e-5))[0] == 0
    code, facts = judge(capsys, family, write("wrong", 2.5e-5))
    assert (code, failed(facts)) == (1, ["mean_bias", "last_steps"])
    assert facts["loss_floor"] == 2**-8 / 64


def test_one_validation_that_happens_to_agree_is_not_the_noise(
    capsys: Capture, write: Write
) -> None:
    agrees_at_last = np.where(np.arange(STEPS) < 100, 1e-3, 0.0)
    family = str(write("plain")), str(write("reversed", NOISE, validation=agrees_at_last))
    code, facts = judge(capsys, family, write("magi", ODD, validation=1e-3))
    assert code == 0
    assert facts["gates"]["validation"]["limit"] == pytest.approx(2 * 1e-3 * math.sqrt(2 / 3))


@pytest.mark.parametrize("role", [0, 1], ids=["baseline", "noise"])
def test_nothing_is_measured_with_inf_and_nan(capsys: Capture, write: Write, role: int) -> None:
    broken = NOISE.copy()
    broken[7] = np.nan
    family = [str(write("plain", broken if role == 0 else 0.0)),
              str(write("reversed", broken if role else NOISE))]  # fmt: skip
    code, _, err = run(capsys, "compare", family[0], str(write("magi")), "--noise", family[1])
    assert code == 2 and "must be finite, got 1 values" in err


def test_a_noise_run_without_noise_is_refused(
    capsys: Capture, family: tuple[str, str], write: Write
) -> None:
    right = str(write("magi", ODD))
    for noise in (family[0], str(write("again"))):
        code, _, err = run(capsys, "compare", family[0], right, "--noise", noise)
        assert code == 2 and "must differ by rounding" in err
        assert "train one with another kernel" in err
