"""Where the checkouts of frameworks are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def framework(request: pytest.FixtureRequest) -> Iterator[Callable[[str], str]]:
    """The path that --framework gives for a name; without one the test is skipped."""
    given = dict(each.split("=", 1) for each in request.config.getoption("--framework", None) or [])

    def path_of(name: str) -> str:
        if name not in given:
            pytest.skip(f"needs --framework {name}=PATH")
        return given[name]

    yield path_of
    for name in [n for n in sys.modules if n.split(".")[0] in ("magi_attention", "veomni")]:
        del sys.modules[name]
