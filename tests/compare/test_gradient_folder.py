"""Dumped gradients on disk: whole or not there, in reading order, and summed piece by piece."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from megatron_magi.compare import gradient_folder
from megatron_magi.compare.gradient_folder import (
    dumped_iterations,
    finish,
    forget_gradients,
    gradient_path,
    read_gradient,
    read_shapes,
    sum_squares,
    write_gradient,
)
from megatron_magi.compare.run_error import RunError
from megatron_magi.training.process.whole_files import partial_folder


def write_folder(run: Path, iteration: int, value: float = 1.0) -> None:
    partial = partial_folder(gradient_path(run, iteration))
    gradient = np.full((2, 3), value, np.float32)
    finish(partial, {"w": ((2, 3), write_gradient(partial, "w", gradient))})


def test_a_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    partial = partial_folder(gradient_path(tmp_path, 7))
    write_gradient(partial, "w", np.ones(3, np.float32))
    assert dumped_iterations(tmp_path) == []
    finish(partial, {"w": ((3,), 1.0)})
    assert dumped_iterations(tmp_path) == [7]
    assert json.loads((gradient_path(tmp_path, 7) / "index.json").read_text())["iteration"] == 7
    write_folder(tmp_path, 7, 2.0)  # written again, it replaces the old one
    assert read_shapes(tmp_path, 7) == {"w": (2, 3)}
    assert float(read_gradient(tmp_path, 7, "w")[0, 0]) == 2.0


def test_another_start_forgets_what_it_will_not_reach(tmp_path: Path) -> None:
    for iteration in (1, 5):
        write_folder(tmp_path, iteration)
    (tmp_path / "gradient_errors.csv").touch()
    forget_gradients(tmp_path, after_iteration=3)
    assert dumped_iterations(tmp_path) == [1]
    assert not (tmp_path / "gradient_errors.csv").exists()


def test_a_broken_file_is_one_clear_error(tmp_path: Path) -> None:
    write_folder(tmp_path, 1)
    (gradient_path(tmp_path, 1) / "w.npy").write_bytes(b"short")
    with pytest.raises(RunError, match=r"must be readable, got .*w\.npy; dump it again"):
        read_gradient(tmp_path, 1, "w")


def test_parameters_stand_in_reading_order(tmp_path: Path) -> None:
    """Also in norms.csv, whatever the order in which ranks sent them."""
    order = [
        "embedding.word_embeddings.weight",
        "decoder.layers.2.mlp.weight",
        "decoder.layers.10.mlp.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    ]
    partial = partial_folder(gradient_path(tmp_path, 1))
    finish(partial, {name: ((2, 3), float(i)) for i, name in reversed(list(enumerate(order)))})
    assert list(read_shapes(tmp_path, 1)) == order
    with (gradient_path(tmp_path, 1) / "norms.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[1:] == [[name, "2x3", str(float(i))] for i, name in enumerate(order)]


def test_a_gradient_is_written_whole_and_its_norm_returned(tmp_path: Path) -> None:
    partial = partial_folder(gradient_path(tmp_path, 1))
    gradient = np.array([[3.0, 0.0], [0.0, -4.0]], np.float32)
    norm = write_gradient(partial, "w", gradient)
    finish(partial, {"w": ((2, 2), norm)})
    assert norm == 5.0 and np.array_equal(read_gradient(tmp_path, 1, "w"), gradient)


def test_other_names_are_no_dumps(tmp_path: Path) -> None:
    write_folder(tmp_path, 12_345_678)
    write_folder(tmp_path, 2)
    for name in ("iter_0000003.partial", "iter_x", "iter_0000004"):
        (tmp_path / "gradients" / name).mkdir()
    (tmp_path / "gradients" / "iter_0000003.partial" / "index.json").touch()
    (tmp_path / "gradients" / "iter_x" / "index.json").touch()
    assert dumped_iterations(tmp_path) == [2, 12_345_678]
    index = json.loads((gradient_path(tmp_path, 12_345_678) / "index.json").read_text())
    assert index["iteration"] == 12_345_678
    assert dumped_iterations(tmp_path / "nowhere") == []


@pytest.mark.parametrize("size", [1, 3, 4, 9])
def test_squares_are_summed_over_pieces_in_double_precision(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(gradient_folder, "BLOCK", 4)
    gradient = np.full(size, 3e30, np.float32)  # its squares are beyond single precision
    assert sum_squares(gradient) == pytest.approx(size * float(np.float32(3e30)) ** 2, rel=1e-12)
