"""Options that scripts share."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from script_options import at_least


def test_at_least() -> None:
    assert at_least(2)("2") == 2 and at_least(16, 16)("32") == 32
    for text in ("1", "-3", "2.5", "two", ""):
        with pytest.raises(argparse.ArgumentTypeError, match=f"number of 2 or more, got {text}$"):
            at_least(2)(text)
    for text in ("0", "20"):
        with pytest.raises(argparse.ArgumentTypeError, match="16 or more, a multiple of 16, got"):
            at_least(16, 16)(text)
