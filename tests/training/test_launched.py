"""The place that a launcher's variables give this process."""

from __future__ import annotations

import pytest

from megatron_magi.training.process.processes import Place, launched_place


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("alone", [{}, {"RANK": "1"}, {"WORLD_SIZE": "2"}, {"LOCAL_RANK": "0"}])
def test_a_process_that_no_launcher_started_has_no_place(
    monkeypatch: pytest.MonkeyPatch, alone: dict[str, str]
) -> None:
    for name, value in alone.items():
        monkeypatch.setenv(name, value)
    assert launched_place() is None


def test_the_place_is_that_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    assert launched_place() == Place(rank=11, world_size=16, local_rank=3)
    monkeypatch.delenv("LOCAL_RANK")  # one process a node
    assert launched_place() == Place(rank=11, world_size=16, local_rank=0)
