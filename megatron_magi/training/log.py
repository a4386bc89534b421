"""What a run tells: Megatron's line, one of ours, a bar on a terminal, and a CSV of every step."""

from __future__ import annotations

import csv
import sys
from collections import deque
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING

from megatron_magi.training.config import RunConfig
from megatron_magi.training.recipe import to_yaml

if TYPE_CHECKING:
    from megatron_magi.training.data import PackedDataset

BAR_WIDTH = 30


@dataclass(frozen=True)
class StepRecord:
    """One iteration; the columns of the CSV."""

    iteration: int
    lm_loss: float
    """Mean over all counted tokens of the global batch, nats."""
    grad_norm: float
    """Global, before clipping."""
    learning_rate: float
    """Used in this iteration."""
    loss_tokens: int
    """Tokens whose loss counts."""
    consumed_samples: int
    step_seconds: float
    tokens_per_second: float
    """Of the whole world, all tokens of the batch."""
    tflops_per_rank: float
    """Visible cells only; see `flops.py`."""
    memory_gib: float
    """Highest peak of a rank: CUDA allocator, or resident memory on a CPU."""
    cp_imbalance: float
    """Largest over mean attention load of the context-parallel ranks, mean over microbatches."""


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
    """What Megatron's line lacks."""
    return (
        f" magi | tokens/s: {record.tokens_per_second:.0f} |"
        f" TFLOP/s per rank: {record.tflops_per_rank:.4g} |"
        f" peak memory: {record.memory_gib:.2f} GiB |"
        f" CP balance (max/mean): {record.cp_imbalance:.3f} |"
        f" ETA: {timedelta(seconds=round(seconds_left))} |"
    )


class RunLog:
    """Log of a run on the one rank that writes; silent on the others."""

    def __init__(self, config: RunConfig, is_writer: bool) -> None:
        self.config = config
        self.folder = Path(config.log.dir) / config.name
        self.is_writer = is_writer
        self.recent: deque[float] = deque(maxlen=20)
        self.has_bar = is_writer and config.log.progress and sys.stderr.isatty()
        self.file: IO[str] | None = None

    def __enter__(self) -> RunLog:
        if self.is_writer:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "recipe.yaml").write_text(to_yaml(self.config))
            if self.config.log.csv:
                self.file = (self.folder / "steps.csv").open("w", newline="")
                self.rows = csv.DictWriter(self.file, [f.name for f in fields(StepRecord)])
                self.rows.writeheader()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._clear_bar()
        if self.file is not None:
            self.file.close()

    def header(self, dataset: PackedDataset, world_size: int) -> None:
        """Start-up lines: the reference where it runs, the data, where output goes."""
        if self.config.attention == "dense":
            self._say("attention: dense, Megatron's DotProductAttention (the reference)")
        p = self.config.parallel
        self._say(
            f"data: {self.config.data.path}, {len(dataset.lengths):,} documents, "
            f"{int(dataset.lengths.sum()):,} tokens, {dataset.samples_per_epoch:,} samples of "
            f"{self.config.data.seq_length} tokens per epoch\n"
            f"world: {world_size} processes, tp {p.tp} pp {p.pp} cp {p.cp} "
            f"dp {world_size // p.model_size}; output in {self.folder}"
        )

    def step(self, record: StepRecord) -> None:
        """Record one iteration."""
        self.recent.append(record.step_seconds)
        if not self.is_writer:
            return
        if self.file is not None:
            self.rows.writerow(asdict(record))
            self.file.flush()
        left = self.config.train.iterations - record.iteration
        seconds_left = left * sum(self.recent) / len(self.recent)
        if record.iteration % self.config.log.interval == 0 or left == 0:
            self._say(megatron_line(record, self.config, datetime.now()))
            self._say(magi_line(record, seconds_left))
        self._draw_bar(record, seconds_left)

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
