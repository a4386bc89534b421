"""Dumped gradients on disk: a .npy file per parameter, an index and norms. Needs no torch.

RUN/gradients/iter_NNNNNNN holds NAME.npy (fp32, whole) for every parameter, index.json and
norms.csv. It is written under a name that ends in .partial and renamed at the end, so a folder
without that ending is whole.
"""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_magi.compare.run_error import RunError

FOLDER, INDEX, NORMS, ERRORS = "gradients", "index.json", "norms.csv", "gradient_errors.csv"
BLOCK = 1 << 22
"""Elements that are read and squared at a time: 32 MiB in double precision."""
Gradient = npt.NDArray[np.float32]
Shapes = dict[str, tuple[int, ...]]


def gradient_path(run: Path, iteration: int) -> Path:
    """The folder of a run's gradients of an iteration."""
    return run / FOLDER / f"iter_{iteration:07d}"


def dumped_iterations(run: Path) -> list[int]:
    """Iterations whose gradients are whole, in order."""
    found = [p.name for p in (run / FOLDER).glob("iter_*") if (p / INDEX).is_file()]
    return sorted(int(n[5:]) for n in found if re.fullmatch(r"iter_\d{7,}", n))


def forget_gradients(run: Path, after_iteration: int) -> None:
    """Delete dumps of later iterations and measured errors, which another start of the run made."""
    for iteration in dumped_iterations(run):
        if iteration > after_iteration:
            shutil.rmtree(gradient_path(run, iteration))
    (run / ERRORS).unlink(missing_ok=True)


def write_gradient(partial: Path, name: str, gradient: Gradient) -> float:
    """Write a parameter's gradient and return its L2 norm."""
    np.save(partial / f"{name}.npy", gradient)
    return math.sqrt(sum_squares(gradient))


def finish(partial: Path, norms: dict[str, tuple[tuple[int, ...], float]]) -> Path:
    """Make a written folder whole (one process calls it).

    Args:
        norms: shape and L2 norm by parameter.
    """
    iteration = int(partial.stem[5:])
    shapes = {name: list(norms[name][0]) for name in sorted(norms, key=_reading_order)}
    with (partial / NORMS).open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["parameter", "shape", "norm"])
        for name, shape in shapes.items():
            rows.writerow([name, "x".join(map(str, shape)), norms[name][1]])
    index = {"iteration": iteration, "dtype": "float32", "shapes": shapes}
    (partial / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    final = partial.with_suffix("")
    shutil.rmtree(final, ignore_errors=True)
    return partial.rename(final)


def read_shapes(run: Path, iteration: int) -> Shapes:
    """Shape of every dumped parameter, embedding and layers in reading order."""
    index = json.loads((gradient_path(run, iteration) / INDEX).read_text())
    return {name: tuple(shape) for name, shape in index["shapes"].items()}


def read_gradient(run: Path, iteration: int, name: str) -> Gradient:
    """A parameter's gradient, mapped from its file and not yet read.

    Raises:
        RunError: a file of the folder is missing or broken.
    """
    path = gradient_path(run, iteration) / f"{name}.npy"
    try:
        gradient: Gradient = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise RunError(
            f"every dumped gradient must be readable, got {error} for {path}; dump it again"
        ) from None
    return gradient


def blocks(*arrays: Gradient) -> Iterator[tuple[npt.NDArray[np.float64], ...]]:
    """Arrays of one shape, piece by piece in double precision; only one piece is in memory."""
    flat = [a.reshape(-1) for a in arrays]
    for begin in range(0, flat[0].size, BLOCK):
        yield tuple(a[begin : begin + BLOCK].astype(np.float64) for a in flat)


def sum_squares(gradient: Gradient) -> float:
    """Sum of squares in double precision."""
    return float(sum(np.dot(x, x) for (x,) in blocks(gradient)))


def _reading_order(name: str) -> tuple[int, list[str | int]]:
    """The embedding first, layers by number, the output last."""
    place = 0 if name.startswith("embedding") else 2 if name.startswith("output") else 1
    place += "final" in name
    return place, [int(w) if w.isdigit() else w for w in re.split(r"(\d+)", name)]
