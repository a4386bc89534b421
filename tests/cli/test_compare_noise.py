"""compare --noise: what noise runs measure, and which are refused."""

import numpy as np
import pytest

from tests.cli.command import Capture, run
from tests.cli.compare_runs import ODD, STEPS, Write, failed, judge


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
