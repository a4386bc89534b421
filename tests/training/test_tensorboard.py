"""TensorBoard gets every step, and its absence stops no run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from megatron_magi.training.run.log import TAGS, RunLog, TensorBoard
from tests.training.step_records import config, record, rows


def test_tensorboard_missing_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # import fails
    with RunLog(config(tmp_path, tensorboard=True), True) as log:
        log.step(record(1))
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "warning: log.tensorboard needs the tensorboard package, got none" in err
    assert rows(tmp_path) == [("1", "2.0")]


def test_tensorboard_gets_every_iteration_under_megatrons_tags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            written.append((folder, 0.0, purge_step))

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            written.append((tag, value, step))

        def close(self) -> None:
            written.append(("closed", 0.0, 0))

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with RunLog(config(tmp_path, tensorboard=True), True, after_iteration=4) as log:
        log.step(record(5, validation=3.0))
    assert written[0] == (str(tmp_path / "run" / "tensorboard"), 0.0, 5)
    assert ("lm loss", 2.0, 5) in written
    assert ("lm loss validation", 3.0, 5) in written
    assert written[-1][0] == "closed"
    assert len(written) == len(TAGS) + 2


def test_event_files_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path, after_iteration=0)
    for i in (1, 2):
        board.step(record(i, loss=float(i)))
    board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("lm loss")] == [(1, 1.0), (2, 2.0)]
