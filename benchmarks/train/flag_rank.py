"""`megatron_magi.run` that measures held-out losses, or that has an error on purpose.

Used by flag_convergence.py, with our flag and without. The script, and Megatron's code but for the
functions that are wrapped here, are as they are. Which of them, the environment says.
"""

from __future__ import annotations

import functools
import inspect
import os
import runpy
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.train import recall_weights
from benchmarks.train.lost_gradients import lose_gradients
from benchmarks.train.recall_counts import RecalledTokens
from megatron_magi import run
from megatron_magi.compare.positions import Bucket, read_positions, write_positions

FOLDER, ENDS, ERROR = "FLAG_RANK_FOLDER", "FLAG_RANK_ENDS", "FLAG_RANK_ERROR"
"""Variables: where measured losses are written, the ends of buckets of positions, and the name of
an error."""
RECALL = "FLAG_RANK_RECALL"
"""A variable that is set for a model that copies, whose recalled tokens are counted instead."""


def main() -> None:
    """Run the script that the command line names."""
    original = runpy.run_path

    def run_path(*args: Any, **kwargs: Any) -> Any:
        if os.environ.get(RECALL):
            recall_weights.install()
        if os.environ.get(FOLDER):
            measure(chosen_record(), Path(os.environ[FOLDER]))
        if os.environ.get(ERROR):
            ERRORS[os.environ[ERROR]]()
        return original(*args, **kwargs)

    runpy.run_path = run_path
    run.main()


class Record(Protocol):
    """What is kept of a validation's losses."""

    def clear(self) -> None:
        """Before a validation."""

    def add(self, losses: Tensor, positions: Tensor) -> None:
        """Count a microbatch."""

    def write(self, folder: Path, iteration: int) -> None:
        """Behind a validation, on every rank."""


def chosen_record() -> Record:
    """The one that the environment names."""
    if os.environ.get(RECALL):
        return RecalledTokens()
    return PositionLosses(tuple(int(end) for end in os.environ[ENDS].split()))


class PositionLosses:
    """Sums of the losses of held-out tokens, by bucket of their positions."""

    def __init__(self, ends: tuple[int, ...]) -> None:
        """
        Args:
            ends: of the buckets, in order; the first begins at 0.
        """
        self.ends = ends
        self.sums = torch.zeros(2, len(ends), dtype=torch.float64)
        """Of losses, and of tokens, on the CPU."""

    def clear(self) -> None:
        """Before a validation."""
        self.sums.zero_()

    def add(self, losses: Tensor, positions: Tensor) -> None:
        """Count a microbatch.

        Args:
            losses: of tokens, in any shape.
            positions: of the same tokens.

        Cost: the host waits for the device.
        """
        ends = torch.tensor(self.ends, device=positions.device)
        bucket = torch.bucketize(positions.reshape(-1), ends, right=True).cpu()
        values = losses.detach().reshape(-1).double().cpu()
        self.sums[0].index_add_(0, bucket, values)
        self.sums[1].index_add_(0, bucket, torch.ones_like(values))

    def means(self, iteration: int) -> dict[Bucket, float]:
        """Mean losses of the whole world's tokens, of buckets that have any, on every rank.

        Cost: an all-reduce.
        """
        sums = self.sums.to(torch.cuda.current_device() if _on_gpu() else "cpu")
        dist.all_reduce(sums)
        starts = (0, *self.ends[:-1])
        buckets = [Bucket(iteration, *bounds) for bounds in zip(starts, self.ends, strict=True)]
        of_bucket = zip(buckets, *sums.tolist(), strict=True)
        return {bucket: loss / tokens for bucket, loss, tokens in of_bucket if tokens}

    def write(self, folder: Path, iteration: int) -> None:
        """Add a validation to positions.csv, on the first rank."""
        means = self.means(iteration)
        if dist.get_rank() == 0:
            write_positions(folder, read_positions(folder) | means)


def _on_gpu() -> bool:
    return str(dist.get_backend()) != "gloo"


def measure(record: Record, folder: Path) -> None:
    """Write what the record keeps of every validation, one after another."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.training import training

    GPTModel.forward = _counted(GPTModel.forward, record)
    evaluate = training.evaluate_and_print_results
    iteration = list(inspect.signature(evaluate).parameters).index("iteration")

    @functools.wraps(evaluate)
    def evaluate_and_print_results(*args: Any, **kwargs: Any) -> Any:
        record.clear()
        result = evaluate(*args, **kwargs)
        record.write(folder, int(args[iteration]))
        return result

    training.evaluate_and_print_results = evaluate_and_print_results


def _counted(forward: Any, record: Record) -> Any:
    """A model's forward that counts the losses of microbatches that are not trained on."""
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def counted(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        if not given["self"].training and given.get("labels") is not None:
            record.add(result, given["position_ids"])
        return result

    return counted


ERRORS = {"lost_gradients": lose_gradients}

if __name__ == "__main__":
    main()
