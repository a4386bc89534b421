"""The output of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LogConfig:
    """What a run writes, under log.dir/NAME."""

    dir: str = "runs"
    """Folder that holds the folders of runs."""
    interval: int = 1
    """Iterations between lines on the screen; the CSV has every iteration."""
    progress: bool = True
    """A progress bar on rank 0's standard error, if that is a terminal."""
    csv: bool = True
    """Write steps.csv, a line for every iteration."""
    overwrite: bool = False
    """Let a run from the start replace the steps.csv of another run of this name."""
    tensorboard: bool = False
    """Also TensorBoard event files, in log.dir/NAME/tensorboard. Needs the tensorboard package."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What a run saves, and from where it resumes; see docs/training.md."""

    dir: str | None = None
    """Folder of the checkpoints. None: log.dir/NAME/checkpoints."""
    interval: int | None = None
    """Iterations between checkpoints; the last iteration saves too. None: only a signal saves."""
    keep: int | None = 2
    """Number of newest checkpoints that are kept. None: all."""
    load: str | None = None
    """"latest": resume from the newest in dir. "auto": the same, or from the start if there is
    none. A path: that checkpoint, or imported weights (docs/weights.md). None: from the start."""
