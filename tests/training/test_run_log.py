"""The CSV goes on where a run goes on; TensorBoard and signals do what they say."""

from __future__ import annotations

import csv
import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_magi.training.process.processes import Place, run_local
from megatron_magi.training.process.stop import StopRequest
from megatron_magi.training.recipe.config import DataConfig, LogConfig, RunConfig
from megatron_magi.training.run.log import RunLog, magi_line, validation_line
from megatron_magi.training.run.step_record import StepRecord
from megatron_magi.training.run.steps_file import read_steps
from megatron_magi.training.run.tensorboard import TAGS, TensorBoard


def record(
    iteration: int,
    loss: float = 2.0,
    validation: float | None = None,
    mfu: float | None = None,
) -> StepRecord:
    return StepRecord(
        iteration=iteration,
        lm_loss=loss,
        grad_norm=1.0,
        learning_rate=1e-3,
        loss_tokens=10,
        consumed_samples=iteration * 8,
        step_seconds=0.5,
        tokens_per_second=100.0,
        tflops_per_rank=1.0,
        mfu=mfu,
        memory_gib=1.0,
        cp_imbalance=1.0,
        validation_loss=validation,
    )


def config(folder: Path, **log: Any) -> RunConfig:
    return RunConfig(
        data=DataConfig(path="x"), log=LogConfig(dir=str(folder), progress=False, **log)
    )


def rows(folder: Path) -> list[tuple[str, str]]:
    with (folder / "run" / "steps.csv").open(newline="") as file:
        return [(r["iteration"], r["lm_loss"]) for r in csv.DictReader(file)]


def test_a_resumed_csv_keeps_what_is_before_the_checkpoint(tmp_path: Path) -> None:
    with RunLog(config(tmp_path), True) as log:
        for i in (1, 2, 3, 4):
            log.step(record(i))
    with RunLog(config(tmp_path), True, after_iteration=2) as log:
        log.step(record(3, loss=1.5))
    assert rows(tmp_path) == [("1", "2.0"), ("2", "2.0"), ("3", "1.5")]
    with RunLog(config(tmp_path), True) as log:
        log.step(record(1, loss=7.0))
    assert rows(tmp_path) == [("1", "7.0")]


def test_a_csv_of_before_a_column_was_added_is_continued(tmp_path: Path) -> None:
    with RunLog(config(tmp_path), True) as log:
        log.step(record(1))
    path = tmp_path / "run" / "steps.csv"
    old = [line.rpartition(",")[0] for line in path.read_text().splitlines()]
    path.write_text("\n".join(old) + "\n")
    with RunLog(config(tmp_path), True, after_iteration=1) as log:
        log.step(record(2, validation=3.0))
    assert rows(tmp_path) == [("1", "2.0"), ("2", "2.0")]
    assert path.read_text().splitlines()[-1].endswith(",3.0")


def test_a_silent_rank_writes_nothing(tmp_path: Path) -> None:
    with RunLog(config(tmp_path, tensorboard=True), False) as log:
        log.step(record(1))
    assert not list(tmp_path.iterdir())


def test_the_validation_line_is_megatrons() -> None:
    line = validation_line(record(20, validation=2.5))
    assert line == (
        " validation loss at iteration 20 | lm loss value: 2.500000E+00 |"
        " lm loss PPL: 1.218249E+01 |"
    )


def test_mfu_stands_in_the_line_where_the_gpu_is_known() -> None:
    known, unknown = magi_line(record(1, mfu=0.4567), 9.0), magi_line(record(1), 9.0)
    assert "TFLOP/s per rank: 1 | MFU: 45.7 % | peak memory: 1.00 GiB |" in known
    assert known.replace(" MFU: 45.7 % |", "") == unknown


def test_an_unknown_mfu_is_an_empty_cell(tmp_path: Path) -> None:
    with RunLog(config(tmp_path), True) as log:
        log.step(record(1))
        log.step(record(2, mfu=0.5))
    assert [row["mfu"] for row in read_steps(tmp_path / "run" / "steps.csv")] == ["", "0.5"]


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


def test_a_signal_is_noted_and_a_second_interrupt_interrupts() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert stop.signal_number == 0
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal_number == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    assert signal.getsignal(signal.SIGTERM) == before


def _until_signalled(place: Place) -> None:
    with StopRequest() as stop:
        Path(f"{place.init_method.removeprefix('file://')}.{place.rank}").touch()
        if place.rank == 0:  # the parent's signal, once every rank listens
            folder = Path(place.init_method.removeprefix("file://")).parent
            while len(list(folder.iterdir())) < place.world_size:
                time.sleep(0.01)
            os.kill(os.getppid(), signal.SIGINT)
        deadline = time.monotonic() + 30
        while not stop.signal_number and time.monotonic() < deadline:
            time.sleep(0.01)
    sys.exit(0 if stop.signal_number == signal.SIGTERM else 3)


def _killed(place: Place) -> None:
    if place.rank:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def test_the_starter_hands_its_signal_to_every_rank() -> None:
    assert run_local(_until_signalled, 2) == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_killed_rank_ends_the_run_with_a_shells_exit_code() -> None:
    begin = time.monotonic()
    assert run_local(_killed, 2) == 128 + signal.SIGTERM
    assert time.monotonic() - begin < 40


@pytest.mark.parametrize(("device", "share"), [("NVIDIA H200", 0.5), ("NVIDIA H20", None)])
def test_mfu_is_the_share_of_the_gpus_rate(
    monkeypatch: pytest.MonkeyPatch, device: str, share: float | None
) -> None:
    """Two ranks that do half of a GPU's work each in the time of a step."""
    pytest.importorskip("megatron.core")
    from megatron_magi.training.run import loop

    per_rank = 0.5 * 989.4e12
    ticks = iter([10.0])
    monkeypatch.setattr(loop.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(loop, "_on_gpu", lambda: True)
    monkeypatch.setattr(loop, "_memory_bytes", lambda: 0)
    monkeypatch.setattr(loop, "step_flops", lambda *_: 2 * 4 * per_rank)
    monkeypatch.setattr(loop.torch.cuda, "get_device_name", lambda: device)
    monkeypatch.setattr(loop.torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(loop.dist, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(loop.dist, "get_world_size", lambda: 2)
    state: Any = SimpleNamespace(iteration=0, consumed_samples=0)
    stop: Any = SimpleNamespace(signal_number=0)
    sums = loop.BatchSums(2.0, 1.0, 1.0, 1.0, 1.0)
    made, _ = loop._finish_step(config(Path("x")), state, (sums, 1.0, 1e-3), 6.0, stop)
    assert made.mfu == pytest.approx(share)
    assert made.tflops_per_rank == pytest.approx(per_rank / 1e12)
