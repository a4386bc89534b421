"""Runs of Megatron's own pretrain scripts, from a checkout that pytest is told of.

`pytest tests/launcher tests/test_patches.py --megatron-checkout PATH`; Megatrons that need Triton
find it on PYTHONPATH.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--megatron-checkout", help="a Megatron-LM source tree to run")
    parser.addoption("--framework", action="append", help="NAME=PATH: see tests/frameworks")
    parser.addoption("--losses-record", help="file for the losses of all runs, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "megatron_checkout: needs --megatron-checkout PATH")
    config.addinivalue_line("markers", "framework: needs --framework NAME=PATH")
    # A shell starts what runs in the background with Ctrl-C ignored, and every process inherits it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionfinish(session: pytest.Session) -> None:
    from tests.launcher.layouts import recorded

    path = session.config.getoption("--losses-record", None)
    if path is not None:
        checkout = session.config.getoption("--megatron-checkout")
        meta = {
            "date": datetime.date.today().isoformat(),
            "megatron": Path(checkout).name,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": "CPU, gloo, fp32",
            "command": "scripts/test_megatron.sh CHECKOUT",
        }
        Path(path).write_text(json.dumps({"meta": meta, "rows": recorded}, indent=1))


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Takes back what a test left in the environment, such as the ENV_VARS of a recipe."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    """Four ranks of which this process is the third; PyTorch's fake backend has no peers."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized(), "an earlier test left its group behind"
    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def megatron_checkout(request: pytest.FixtureRequest) -> Path:
    """The checkout's root; without the option the test is skipped."""
    given = request.config.getoption("--megatron-checkout", None)
    if given is None:
        pytest.skip("needs --megatron-checkout PATH")
    return Path(given).resolve()
