"""The distributed benchmark's other methods on FlashAttention-3, with a stand-in for its functions
that is written down densely, on gloo: every result is that of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.distributed import attn, flash
from megatron_magi import AttnMask, HeadShape, masks
from megatron_magi.cli.parser import UsageError
from megatron_magi.core.kernel.slice_table import SliceTable
from tests.benchmarks.distributed.rival_jobs import whole_sequence
from tests.dense import NAMES, assert_as_good_as_dense
from tests.process_pool import pool

ROOT = Path(__file__).parents[3]
STAND_IN = Path(__file__).parent / "flash_stand_in"
HEADS = HeadShape(8, 4, 16)
TOTAL = 192
EDGES = [0, 1, 3, 40, 45, 48, 112, 113, 120, TOTAL]
"""Documents of one piece, of less than two a rank, with padding and without."""
METHODS = ["all_gather", "all_gather_zigzag", "ring", "ulysses", "one_gpu"]
MASKS = {
    "full": masks.full(TOTAL),
    "causal": masks.causal(TOTAL),
    "packed_full": masks.from_cu_seqlens(EDGES, causal=False),
    "packed_causal": masks.from_cu_seqlens(EDGES),
    "window": masks.sliding_window(TOTAL, (20, 0)),
    "packed_window": masks.from_cu_seqlens(EDGES, window_size=(20, 0)),
    "one_key": masks.from_cu_seqlens(EDGES, window_size=(0, 0)),
    "unused_rows": masks.from_cu_seqlens(EDGES[:6], total_seqlen=TOTAL),
}
WINDOWED = ("window", "packed_window", "one_key")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("method", METHODS)
def test_a_method_gives_what_one_process_does(method: str, name: str, ranks: int) -> None:
    mask = MASKS[name]
    if method == "ring" and name in WINDOWED:
        assert flash.refuses(method, mask) == flash.NO_WINDOW
        return
    assert flash.refuses(method, mask) is None
    q, k, v, dout, *made = pool(ranks).run(whole_sequence, method, mask, HEADS)[0]
    ours = dict(zip([n for n in NAMES if n != "lse"], made, strict=True))
    assert_as_good_as_dense(ours, (q, k, v, dout), mask, torch.float64)


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (masks.block_causal([[8, 8], [16]]), "no documents"),
        (masks.shared_question([8], [[4, 4]]), "no documents"),
        (masks.from_cu_seqlens([0, 9, 32], causal=False, window_size=(4, 4)), "neither"),
        (masks.from_cu_seqlens([0, 9, 32], causal=False, window_size=(4, -1)), "neither"),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_what_its_functions_do_not_express_is_refused(
    method: str, mask: AttnMask, reason: str
) -> None:
    assert reason in str(flash.refuses(method, mask))


def sequences(mask: AttnMask, left: int = -1) -> object:
    from benchmarks.distributed.sequences import Sequences

    return Sequences.of(SliceTable.of(mask), left)


def test_documents_are_one_call_without_counts() -> None:
    found = sequences(masks.from_cu_seqlens([0, 5, 6, 32]))
    assert found.causal and [len(part.ranges) for part in found.without_common_keys()] == [3]
    given = found.with_empty_rows().arguments()
    for side in "qk":
        assert given[f"cu_seqlens_{side}"].tolist() == [0, 5, 6, 32]
        assert given[f"seqused_{side}"] is None and given[f"max_seqlen_{side}"] == 26


@pytest.mark.parametrize("name", ["packed_full", "packed_causal", "packed_window"])
def test_a_document_is_one_sequence(name: str) -> None:
    found = sequences(MASKS[name], 20 if name in WINDOWED else -1)
    expected = [[begin, end, begin, end] for begin, end in pairwise(EDGES)]
    assert found.ranges.tolist() == expected and found.causal == (name != "packed_full")


def test_two_pieces_of_a_document_share_keys_only_in_the_forward() -> None:
    """Rows 0-3 and 4-7 are the first and the last quarter of 16 tokens; 8 and 9 another document's
    rows behind one row of padding."""
    slices = [[0, 4, 0, 4, -3, 0], [4, 8, 0, 16, -15, 8], [9, 11, 16, 18, 6, 7]]
    found = sequences(AttnMask(np.array(slices, np.int32), 11, 18))
    given = found.with_empty_rows().arguments()
    assert given["cu_seqlens_q"].tolist() == [0, 4, 8, 9, 11] and given["seqused_q"] is None
    assert given["seqused_k"].tolist() == [4, 16, 0, 2]
    assert given["cu_seqlens_k"].tolist()[:2] == [0, 0]
    first, second = found.without_common_keys()
    assert first.ranges[:, 2:].tolist() == [[0, 4], [16, 18]]
    assert second.ranges.tolist() == [[4, 8, 0, 16]]


def test_rows_by_two_rules_or_with_two_ranges_are_refused() -> None:
    mixed = [[0, 4, 0, 4, -3, 3], [4, 8, 4, 8, -3, 0]]
    with pytest.raises(ValueError, match="one rule for all"):
        sequences(AttnMask(np.array(mixed, np.int32), 8, 8))
    apart = [[0, 4, 0, 2, -3, 1], [0, 4, 4, 6, 1, 5]]
    with pytest.raises(ValueError, match="rows that see several"):
        sequences(AttnMask(np.array(apart, np.int32), 4, 8))


def run(folder: Path, *options: str, path: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.distributed.attn", "--device", "cpu"]
    command += ["--ranks", "2"]
    command += ["--tokens", "64", "--heads", "4,2", "--head-dim", "8", "--rounds", "1"]
    command += ["--record", folder / "dist.json", *options]
    known = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONPATH": known}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)


@pytest.mark.slow  # test_attn.py runs the program by default
def test_its_columns_are_in_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, "--masks", "prefix_tree,d1:0-1,d2:0", path=str(STAND_IN))
    assert done.returncode == 0 and "WRONG" not in done.stdout, done.stdout + done.stderr
    assert "ring_fa3 left out: no documents in this mask" in done.stderr
    rows = json.loads((tmp_path / "dist.json").read_text())["rows"]
    on_flash = {name + flash.FA3 for name in METHODS if name != "one_gpu"}
    found = {mask: {r["impl"] for r in rows if r["mask"] == mask} for mask in ("d1:1", "d2:0")}
    assert all(on_flash < impls and "all_gather" in impls for impls in found.values())
    assert not on_flash & {r["impl"] for r in rows if r["mask"] == "prefix_tree"}


def test_without_the_package_its_columns_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "flash_attn_interface.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert attn.importable(["ours", "ring", "ring_fa3", "ulysses_fa3"]) == ["ours", "ring"]
    said = capsys.readouterr().err
    assert "no columns ring_fa3, ulysses_fa3: flash_attn_interface cannot be" in said
    with pytest.raises(UsageError, match="no implementation that can run here"):
        attn.main(["--device", "cpu", "--masks", "causal", "--impls", "ring_fa3"])
