"""The FSDP2 example trains the same model at every context-parallel size, also after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.example_runs import printed_losses

pytestmark = [pytest.mark.one_version, pytest.mark.timeout(900)]


@pytest.mark.slow
def test_a_resume_at_another_size_trains_what_one_process_trains(tmp_path: Path) -> None:
    alone = printed_losses("fsdp2.py", 1, "--steps=4")
    assert len(alone) == 4 and alone[-1] < alone[0] - 1
    folder = f"--checkpoint={tmp_path / 'run'}"
    first = printed_losses("fsdp2.py", 2, "--cp=2", "--steps=2", folder)
    rest = printed_losses("fsdp2.py", 2, "--cp=1", "--steps=4", folder)
    assert (len(first), len(rest)) == (2, 2)
    assert first + rest == pytest.approx(alone, rel=1e-5)
