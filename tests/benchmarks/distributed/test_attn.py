"""The distributed benchmark on gloo: it runs, its figures fit, and it notices errors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.distributed import attn as bench
from megatron_magi.cli.parser import UsageError
from megatron_magi.core.mask.mask import dense_from_slices


def run(folder: Path, *options: str) -> dict[str, Any]:
    """The record of a run that found nothing wrong; two ranks, if not said otherwise."""
    record = folder / "dist.json"
    given = ["--device", "cpu", "--ranks", "2", "--head-dim", "8", "--record", str(record)]
    assert bench.main([*given, *options]) == 0
    return json.loads(record.read_text())


def test_two_ranks_on_the_cpu(tmp_path: Path) -> None:
    impls = ["ours", "ours0", "narrow", "kernels", "all_gather", "all_gather_zigzag", "ring",
             "ulysses", "one_gpu"]  # fmt: skip
    masks = ["packed_causal", "swa1024", "shared_question"]
    given = ["--masks", ",".join(masks), "--impls", ",".join(impls), "--rounds", "2"]
    record = run(tmp_path, "--tokens", "48", "--heads", "4,2", *given)
    rows = {(r["mask"], r["impl"], r["direction"]): r for r in record["rows"]}
    assert set(rows) == {(m, i, d) for m in masks for i in impls for d in ("fwd", "bwd")}
    for row in rows.values():
        assert 0 < row["min_ms"] <= row["ms"] <= row["max_ms"] and row["n"] == 2
        assert row["heads"] == [4, 2] and row["head_dim"] == 8
    ours = rows["packed_causal", "ours", "fwd"]
    assert len(ours["received_rows"]) == 2 and max(ours["received_rows"]) <= 48
    layouts = [rows[m, "all_gather_zigzag", "bwd"]["layout"] for m in masks]
    assert layouts == ["zigzag per document"] * 2 + ["zigzag per sequence"]
    for name in ("all_gather_zigzag", "ring"):
        assert rows["packed_causal", name, "fwd"]["padding_tokens"] > 0
    assert record["meta"]["date"] and "--masks packed_causal" in record["meta"]["command"]


def test_keys_with_a_home_of_their_own(tmp_path: Path) -> None:
    """Queries that are sent and keys that are sent give what one rank computes."""
    impls = "ours,send_queries_on,send_queries_off,all_gather,one_gpu"
    given = ["--masks", "cross_text,few_queries", "--impls", impls, "--rounds", "1"]
    record = run(tmp_path, "--tokens", "64", "--heads", "4,4", *given)
    rows = {(r["mask"], r["impl"]): r for r in record["rows"] if r["direction"] == "fwd"}
    assert len(rows) == 8, "all_gather takes no keys with a home of their own"
    assert max(rows["few_queries", "send_queries_off"]["received_rows"]) == 64
    assert max(rows["few_queries", "ours"]["received_rows"]) == 0


class Fixed:
    def __init__(self, *full: torch.Tensor) -> None:
        self._full = full or None

    def full(self) -> tuple[torch.Tensor, ...] | None:
        return self._full


def test_other_results_are_named() -> None:
    x = torch.randn(8, 2, 4)
    made = {
        "ours": Fixed(x, x), "kernels": Fixed(), "close": Fixed(x, x * 1.001),
        "far": Fixed(x, x.flip(0)), "nan": Fixed(x, x / 0 * 0),
    }  # fmt: skip
    wrong = list(bench.disagreements(made))
    assert [line.split()[0] for line in wrong] == ["far", "nan"]


@pytest.mark.slow
def test_one_communicator_and_two_agree(tmp_path: Path) -> None:
    impls = ["all_to_all", "all_to_all4", "keep_received_keys"]
    given = ["--masks", "causal", "--impls", ",".join(impls), "--rounds", "1"]
    record = run(tmp_path, "--tokens", "384", "--heads", "4,2", *given, "--max-connections", "1")
    assert record["meta"]["max_connections"] == "1"
    degrees = {row["impl"]: row["overlap_degree"] for row in record["rows"]}
    assert set(degrees) == set(impls)
    assert degrees["all_to_all4"] == 4


@pytest.mark.parametrize("option", ["--masks", "--impls"])
def test_unknown_names_are_refused_before_ranks_start(option: str) -> None:
    with pytest.raises(UsageError, match=f"{option} takes"):
        bench.main([option, "ours,full", "--device", "cpu"])


def test_every_shape_meets_every_mask() -> None:
    args = bench.options(["--heads", "64,8", "32,8", "--head-dim", "128", "64", "--tokens", "8,16",
                          "--masks", "full,causal"])  # fmt: skip
    found = [(each.shape.num_heads_q, each.shape.head_dim, each.tokens, each.mask)
             for each in bench.settings(args)]  # fmt: skip
    assert len(set(found)) == 8 and found[0] == (64, 128, 8, "full")
    assert found[-1] == (32, 64, 16, "causal")
    with pytest.raises(UsageError, match="--head-dim takes one value or 2, got 3"):
        bench.options(["--heads", "64,8", "32,8", "--head-dim", "128", "64", "96"])


def test_ulysses_needs_heads_for_every_rank() -> None:
    with pytest.raises(UsageError, match="ulysses needs key/value heads that 3 ranks divide"):
        bench.main(["--device", "cpu", "--ranks", "3", "--heads", "4,2", "--impls", "ulysses"])


@pytest.mark.slow
def test_three_ranks_agree(tmp_path: Path) -> None:
    """A ring of three has a step in the middle, and gradients that go round twice."""
    given = ["--masks", "packed_causal,full", "--impls", "one_gpu,ring,ulysses", "--rounds", "1"]
    run(tmp_path, "--ranks", "3", "--tokens", "32", "--heads", "6,3", *given)


def test_too_few_gpus_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--ranks", "99"]) == 2
    assert "99 GPUs are needed" in capsys.readouterr().err


def test_the_zigzag_peer_is_compared_and_runs_unasked() -> None:
    assert "all_gather_zigzag" in bench.options([]).impls


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("mask", ["packed_causal", "causal", "swa1024", "prefix_tree"])
def test_a_rank_of_the_zigzag_sees_its_rows_of_the_mask(mask: str, ranks: int) -> None:
    from benchmarks.distributed.zigzag import ZigzagLayout

    made = bench.MASKS[mask](640)
    layout, dense = ZigzagLayout.of(made, ranks), made.to_dense()
    order, per_rank = layout.natural_order(), len(layout.rows[0])
    gathered = np.concatenate(layout.rows)
    assert gathered[order[:640]].tolist() == list(range(640)) and (gathered[order[640:]] < 0).all()
    for rank, rows in enumerate(layout.rows):
        assert len(rows) == per_rank
        seen = dense_from_slices(layout.local_slices(made, rank), per_rank, 640)
        assert np.array_equal(seen, dense[rows] & (rows >= 0)[:, None])
