"""The example with Transformers trains the same model at every context-parallel size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.example_runs import printed_losses

pytest.importorskip("transformers")
pytestmark = [pytest.mark.one_version, pytest.mark.timeout(900)]


def test_two_context_ranks_continue_what_one_has_begun(tmp_path: Path) -> None:
    folder = str(tmp_path / "model")
    start = printed_losses("huggingface.py", 1, "--steps=3", f"--save={folder}")
    assert len(start) == 3 and start[-1] < start[0]
    flags = (f"--model={folder}", "--steps=2")
    alone = printed_losses("huggingface.py", 1, *flags)
    shared = printed_losses("huggingface.py", 2, "--cp=2", *flags)
    assert alone[0] < start[0]
    assert shared == pytest.approx(alone, rel=1e-5)
