"""Runs of Megatron's own pretrain scripts, from a checkout that pytest is told of.

`pytest tests/launcher tests/test_patches.py --megatron-checkout PATH`; Megatrons that need Triton
find it on PYTHONPATH.
"""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--megatron-checkout", help="a Megatron-LM source tree to run")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "megatron_checkout: needs --megatron-checkout PATH")


@pytest.fixture(scope="session")
def megatron_checkout(request: pytest.FixtureRequest) -> Path:
    """The checkout's root; without the option the test is skipped."""
    given = request.config.getoption("--megatron-checkout", None)
    if given is None:
        pytest.skip("needs --megatron-checkout PATH")
    return Path(given).resolve()
