"""The log of a run: Megatron's line, one of ours, a bar on a terminal, a CSV of every step."""

from __future__ import annotations

import contextlib
import csv
import math
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from datetime import datetime, timedelta
from pathlib import Path
from typing import IO, Any

from megatron_magi.adapter.fused.parts import choose_parts
from megatron_magi.compare.steps_file import STEPS, StepRecord, read_steps
from megatron_magi.training.data.packed_samples import PackedDataset
from megatron_magi.training.process.whole_files import cannot_write, written_whole
from megatron_magi.training.recipe.recipe import to_yaml
from megatron_magi.training.recipe.run_config import RunConfig

TAGS = {
    "lm_loss": "lm loss",
    "validation_loss": "lm loss validation",
    "grad_norm": "grad-norm",
    "learning_rate": "learning-rate",
    "step_seconds": "iteration-time",
    "tokens_per_second": "magi/tokens per second",
    "tflops_per_rank": "magi/TFLOPs per rank",
    "memory_gib": "magi/peak memory GiB",
    "cp_imbalance": "magi/CP balance",
}
"""Columns of the CSV under Megatron's own tags, where it has one."""


class TensorBoard:
    """Scalars of every iteration; does nothing, after one line on stderr, without tensorboard."""

    def __init__(self, folder: Path, after_iteration: int) -> None:
        self.writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            print(
                "warning: log.tensorboard needs the tensorboard package, got none; no event files "
                "are written (pip install tensorboard)",
                file=sys.stderr,
                flush=True,
            )
            return
        # TensorBoard drops what an interrupted start wrote after its checkpoint.
        self.writer = SummaryWriter(str(folder), purge_step=after_iteration + 1)

    def step(self, record: StepRecord) -> None:
        """Write one iteration."""
        if self.writer is not None:
            for name, value in asdict(record).items():
                if name in TAGS and value is not None:
                    self.writer.add_scalar(TAGS[name], value, record.iteration)

    def close(self) -> None:
        """Flush to disk."""
        if self.writer is not None:
            self.writer.close()


BAR_WIDTH = 30
BASELINES = {
    "dense": "attention: dense, Megatron's DotProductAttention (the baseline)",
    "flex_plain": "attention: flex_plain, PyTorch's FlexAttention (the baseline)",
    "sdpa": "attention: sdpa, PyTorch's scaled_dot_product_attention (the baseline)",
}


def megatron_line(record: StepRecord, config: RunConfig, now: datetime) -> str:
    """Megatron's training log line, field by field as its `training_log` prints it."""
    return (
        f" [{now.strftime('%Y-%m-%d %H:%M:%S.%f')}]"
        f" iteration {record.iteration:8d}/{config.train.iterations:8d} |"
        f" consumed samples: {record.consumed_samples:12d} |"
        f" elapsed time per iteration (ms): {record.step_seconds * 1000.0:.1f} |"
        f" learning rate: {record.learning_rate:.6E} |"
        f" global batch size: {config.train.global_batch_size:5d} |"
        f" lm loss: {record.lm_loss:.6E} |"
        f" loss scale: {1.0:.1f} |"
        f" grad norm: {record.grad_norm:.3f} |"
        f" number of skipped iterations: {0:3d} |"
        f" number of nan iterations: {0:3d} |"
    )


def magi_line(record: StepRecord, seconds_left: float) -> str:
    """Our line, with the figures that Megatron's lacks."""
    mfu = "" if record.mfu is None else f" MFU: {100 * record.mfu:.1f} % |"
    return (
        f" magi | tokens/s: {record.tokens_per_second:.0f} |"
        f" TFLOP/s per rank: {record.tflops_per_rank:.4g} |"
        f"{mfu}"
        f" peak memory: {record.memory_gib:.2f} GiB |"
        f" CP balance (max/mean): {record.cp_imbalance:.3f} |"
        f" ETA: {timedelta(seconds=round(seconds_left))} |"
    )


def validation_line(record: StepRecord) -> str:
    """Megatron's line of a validation."""
    assert record.validation_loss is not None
    return (
        f" validation loss at iteration {record.iteration} |"
        f" lm loss value: {record.validation_loss:.6E} |"
        f" lm loss PPL: {math.exp(min(20.0, record.validation_loss)):.6E} |"
    )


class RunLog:
    """The log of a run on the one rank that writes; the others write nothing.

    Args:
        after_iteration: iterations completed before this start; the CSV keeps their lines.
    """

    def __init__(self, config: RunConfig, is_writer: bool, after_iteration: int = 0) -> None:
        self.config = config
        self.folder = config.folder
        self.is_writer = is_writer
        self.recent: deque[float] = deque(maxlen=20)
        self.has_bar = is_writer and config.log.progress and sys.stderr.isatty()
        self.after_iteration = after_iteration
        self.file: IO[str] | None = None
        self.board: TensorBoard | None = None

    def __enter__(self) -> RunLog:
        if not self.is_writer:
            return self
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "recipe.yaml").write_text(to_yaml(self.config))
            if self.config.log.csv:
                self._open_csv(self.folder / STEPS)
            if self.config.log.tensorboard:
                self.board = TensorBoard(self.folder / "tensorboard", self.after_iteration)
        return self

    def _open_csv(self, path: Path) -> None:
        done = steps_until(path, self.after_iteration) if self.after_iteration else []
        names = [f.name for f in fields(StepRecord)]
        with written_whole([path]) as (partial,), partial.open("w", newline="") as file:
            rows = csv.DictWriter(file, names, extrasaction="ignore")
            rows.writeheader()
            rows.writerows(done)
        self.file = path.open("a", newline="")
        self.rows = csv.DictWriter(self.file, names, extrasaction="ignore")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Inside, a full disk or an unwritable folder gives a one-line error that names it."""
        try:
            yield
        except OSError as error:
            remedy = "make room or set log.dir, and go on from the last checkpoint"
            raise cannot_write("the log of a run", self.folder, error, remedy) from error

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._clear_bar()
        # Closing tries again to write what could not be written; the first error is enough.
        with self._writing() if error is None else contextlib.suppress(OSError):
            if self.file is not None:
                self.file.close()
            if self.board is not None:
                self.board.close()

    def header(self, dataset: PackedDataset, world_size: int, news: Sequence[str] = ()) -> None:
        """Start-up lines: the baseline where it runs, the data, where output goes, `news`."""
        if self.config.attention != "magi":
            self._say(BASELINES[self.config.attention])
        self._say(f"fused: {choose_parts(self.config.model.fused)}")
        p, number = self.config.parallel, len(dataset.lengths) - len(dataset.documents)
        held_out = f"; {number:,} documents held out" if number else ""
        self._say(
            f"data: {self.config.data.path}, {len(dataset.documents):,} documents, "
            f"{dataset.num_tokens:,} tokens, {dataset.samples_per_epoch:,} samples of "
            f"{self.config.data.seq_length} tokens per epoch"
            f"{held_out}\n"
            f"world: {world_size} processes, tp {p.tp} pp {p.pp} cp {p.cp} "
            f"dp {world_size // p.model_size}; output in {self.folder}"
        )
        for line in news:
            self._say(line)

    def step(self, record: StepRecord) -> None:
        """Record one iteration."""
        self.recent.append(record.step_seconds)
        if not self.is_writer:
            return
        with self._writing():
            if self.file is not None:
                self.rows.writerow(asdict(record))
                self.file.flush()
            if self.board is not None:
                self.board.step(record)
        left = self.config.train.iterations - record.iteration
        seconds_left = left * sum(self.recent) / len(self.recent)
        if record.iteration % self.config.log.interval == 0 or left == 0:
            self._say(megatron_line(record, self.config, datetime.now()))
            self._say(magi_line(record, seconds_left))
        if record.validation_loss is not None:
            self._say(validation_line(record))
        self._draw_bar(record, seconds_left)

    def saved(self, path: Path, iteration: int) -> None:
        """Log that a checkpoint is complete."""
        self._say(f" checkpoint of iteration {iteration}: {path}")

    def stopped(self, signal_name: str, iteration: int) -> None:
        """Log that a signal ended the run, and how to resume it."""
        again = "the same command"
        if self.config.checkpoint.load != "auto":
            again += " with checkpoint.load=latest"
        self._say(
            f"stopped by {signal_name} after iteration {iteration} of "
            f"{self.config.train.iterations}, nothing is lost; to go on: {again}"
        )

    def _say(self, text: str) -> None:
        if self.is_writer:
            self._clear_bar()
            print(text, flush=True)

    def _draw_bar(self, record: StepRecord, seconds_left: float) -> None:
        if self.has_bar:
            total = self.config.train.iterations
            done = BAR_WIDTH * record.iteration // total
            bar = "#" * done + "." * (BAR_WIDTH - done)
            left = timedelta(seconds=round(seconds_left))
            sys.stderr.write(
                f"\r{self.config.name} [{bar}] {record.iteration}/{total} "
                f"loss {record.lm_loss:.3f}, {left} left "
            )
            sys.stderr.flush()

    def _clear_bar(self) -> None:
        if self.has_bar:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def steps_until(path: Path, iteration: int) -> list[dict[str, str]]:
    """Lines of the iterations up to this one, without a line that a kill or a full disk cut off."""
    return [
        row
        for row in read_steps(path)
        if None not in row.values()
        and row.get("iteration", "").isdecimal()
        and int(row["iteration"]) <= iteration
    ]
