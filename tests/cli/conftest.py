"""Runs beside one curve, for tests of `compare`."""

from functools import partial
from pathlib import Path

import pytest

from tests.cli.compare_runs import NOISE, PARAMETERS, Write, write_beside_curve


@pytest.fixture
def write(tmp_path: Path) -> Write:
    return partial(write_beside_curve, tmp_path)


@pytest.fixture
def family(write: Write) -> tuple[str, str]:
    """Baseline and noise run, with gradients of step 1."""
    baseline = write("plain", gradients=0.0)
    noise = write("reversed", NOISE, gradients={PARAMETERS[0]: 0.1}, validation=1e-4)
    return str(baseline), str(noise)
