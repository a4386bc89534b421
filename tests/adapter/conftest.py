"""The worker process that runs jobs in worlds of forked gloo processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import megatron_magi.adapter  # noqa: F401  prepares megatron before a test imports it
from tests.adapter.slow_layouts import SLOW_LAYOUTS
from tests.megatron_worker import run_jobs_of

JOBS = Path(__file__).parent / "adapter_jobs.py"
WORKER_TIMEOUT_S = 280


@pytest.fixture(scope="session")
def run_jobs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[Any]], dict[str, Any]]:
    """Run jobs of adapter_jobs.py and return their results by name."""
    return lambda jobs: run_jobs_of(JOBS, jobs, tmp_path_factory.mktemp("jobs"), WORKER_TIMEOUT_S)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        params = getattr(item, "callspec", None)
        case = getattr(params.params.get("wanted"), "id", None) if params else None
        if case in SLOW_LAYOUTS.get(item.path.name, ()):
            item.add_marker(pytest.mark.slow)
