"""Without a Hopper GPU the sanitizer script refuses, and says why."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "sanitize_kernels.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_nothing_is_called_clean() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 2 and "a Hopper GPU is needed" in done.stderr
    assert "clean" not in done.stdout
