"""The runs of the convergence protocol: their masks, their corpus, what is read of their logs."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.train import code_corpus, flag_cases, flag_convergence, flag_masks, flag_rank
from benchmarks.train.warm_ranks import Job, Outcome
from megatron_magi import masks
from megatron_magi.cli.parser import UsageError
from megatron_magi.compare.gradient_errors import read_errors
from megatron_magi.compare.model_facts import read_recipe_facts
from megatron_magi.compare.positions import Bucket, write_positions
from megatron_magi.compare.read_run import read_run
from megatron_magi.compare.wgrads import read_wgrads
from megatron_magi.launcher.documents import MaskRequest
from megatron_magi.launcher.flags import MaskFunction

ROOT = Path(__file__).parents[3]
LENGTH = 1024
REQUEST = MaskRequest((0, LENGTH), None)
CAUSAL = np.tril(np.ones((LENGTH, LENGTH), dtype=bool))
LINE = (
    " [2026-11-25 22:00:00] iteration {0:8d}/     400 | consumed samples: {1:12d} | "
    "elapsed time per iteration (ms): 512.5 | learning rate: 2.5E-06 | "
    "global batch size:     4 | lm loss: "
    "1.050{0}E+01 | loss scale: 1.0 | grad norm: 3.125 | number of skipped iterations:   0 |"
)


def hidden(mask: Any) -> Any:
    """Cells that a causal mask shows and this one does not, and those only this one shows."""
    dense = mask.to_dense()
    return np.argwhere(CAUSAL & ~dense).tolist(), np.argwhere(dense & ~CAUSAL).tolist()


def test_every_mask_has_its_one_error() -> None:
    middle, tile = LENGTH // 2, flag_masks.TILE
    square = [[q, k] for q in range(tile) for k in range(tile)]
    missing, more = hidden(flag_masks.far_tile(REQUEST))
    assert missing == [[q + LENGTH - tile, k] for q, k in square] and not more
    missing, more = hidden(flag_masks.near_tile(REQUEST))
    assert missing == [[q + middle, k + middle - tile] for q, k in square] and not more
    missing, more = hidden(flag_masks.shifted_diagonal(REQUEST))
    assert missing == [[q, q] for q in range(1, LENGTH)] and not more


def test_controls_of_documents_have_their_one_error() -> None:
    bounds = (0, 300, 400, LENGTH)
    causal = masks.from_cu_seqlens(list(bounds)).to_dense()
    request, tile = MaskRequest(bounds, None), flag_masks.TILE
    for made, end in ((flag_masks.tile_of_longest, LENGTH), (flag_masks.tile_of_shortest, 300)):
        dense = made(request).to_dense()
        expected = causal.copy()
        expected[end - tile : end, end - 2 * tile : end - tile] = False
        assert np.array_equal(dense, expected) and (causal & ~dense).sum() == tile**2
    moved = masks.from_cu_seqlens([0, 301, 400, LENGTH])
    assert flag_masks.moved_by_one(request) == moved
    short = MaskRequest((0, 200, 400), None)
    assert flag_masks.tile_of_longest(short) == masks.from_cu_seqlens([0, 200, 400])


def test_document_runs_have_one_gpu_or_two() -> None:
    runs = {run.name: run for run in flag_cases.document_runs()}
    assert [run.gpus for run in runs.values()] == [1, 1, 1, 2, 2, 2, 2, 2]
    assert all(run.flags["dataloader-inter-document-masking"] for run in runs.values())
    assert len({run.flags["train-iters"] for run in runs.values()}) == 1, "or samples differ"
    assert runs["doc_moved_by_one"].flags["exit-interval"] == flag_cases.CONTROL_STEPS
    tokens = runs["doc_te"].flags["train-iters"] * 2 * 32768
    assert tokens == 3 * (code_corpus.TOKENS["train"] - 1)


def test_one_sample_of_a_step_has_a_boundary_that_should_be_none() -> None:
    areas = [len(hidden(flag_masks.moved_boundary(REQUEST))[0]) for _ in range(8)]
    assert areas == [(LENGTH // 2) ** 2, 0] * 4


def test_runs_differ_by_what_the_protocol_says() -> None:
    runs = {run.name: run for run in flag_cases.long_runs()}
    assert runs["magi"].flags == runs["magi_again"].flags
    assert runs["deterministic_te_p2p"].flags["cp-comm-type"] == "p2p"
    changed = {"attention-backend", "cp-comm-type"}
    for name, run in runs.items():
        way = name.removeprefix("te_") if name.startswith("te_") else "p2p"
        assert run.flags.get("cp-comm-type") == (None if "magi" in name else way)
        others = {flag for flag, _ in run.flags.items() - runs["magi"].flags.items()}
        mode = {"deterministic-mode"} if "deterministic" in name else set()
        assert others == mode if "magi" in name else others == mode | changed
        assert bool(run.environment) == bool(mode)


def test_fp8_runs_are_the_same_runs_in_fp8() -> None:
    runs = {run.name: run for run in flag_cases.long_runs()}
    of_fp8 = flag_cases.fp8_runs()
    assert [run.name for run in of_fp8] == [
        f"fp8_{name}" for name in ("te_p2p", "magi", "te_all_gather", "magi_again", "te_a2a")
    ]
    for run in of_fp8:
        changed = run.flags.items() - runs[run.name.removeprefix("fp8_")].flags.items()
        assert dict(changed) == {
            "fp8-format": "hybrid", "fp8-recipe": "tensorwise", "train-iters": 300,
            "lr-decay-iters": 300, "eval-interval": 150, "exit-interval": 300,
        }  # fmt: skip
        assert run.validates


def test_names_of_groups_and_of_runs(tmp_path: Path) -> None:
    named = flag_convergence.runs_of(["controls", "te_p2p"], tmp_path)
    assert [run.name for run in named] == [
        "te_p2p", "moved_boundary", "shifted_diagonal", "far_tile", "near_tile", "lost_gradients",
    ]  # fmt: skip
    assert named[0].flags["save-interval"] == flag_cases.SAVED_AT
    gradients = flag_convergence.runs_of(["gradients"], tmp_path)
    assert {run.gradients_of for run in gradients} == {
        "te_p2p", "te_all_gather", "te_a2a", "magi", "magi_deterministic", "deterministic_te_p2p",
    }  # fmt: skip
    steps = [run.flags["train-iters"] for run in gradients]
    assert steps == [1] * 6 + [201] * 6 and all(not run.validates for run in gradients)


def test_a_run_gets_the_gpus_with_the_fewest_runs() -> None:
    gpus = flag_convergence.Gpus((0, 1, 2, 3))
    with pytest.raises(ZeroDivisionError), gpus.lent(2):
        _ = 1 / 0
    with gpus.lent(1) as again:
        assert again == "0", "GPUs of a run that failed are given back"
    with gpus.lent(2) as first, gpus.lent(1) as second, gpus.lent(2) as third:
        assert (first, second, third) == ("0,1", "2", "3,0")
        with gpus.lent(1) as fourth:
            assert fourth == "1"


class FakePool:
    """It keeps the jobs that it is given, and each fails."""

    jobs: ClassVar[list[Job]] = []

    def __init__(self, *_: Any, **__: Any) -> None:
        self.jobs.clear()

    def __enter__(self) -> FakePool:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, job: Job, limit_s: float) -> Outcome:
        self.jobs.append(job)
        return Outcome("", failed=True)


def test_a_run_keeps_no_losses_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is ended before its validation would have them."""
    monkeypatch.setattr(flag_convergence, "WarmRanks", FakePool)
    words = ["x", "paired_te_1", "--megatron", str(tmp_path), "--data", str(tmp_path),
             "--out", str(tmp_path), "--gpus", "4,7"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", words)
    options, (run,) = flag_convergence.parse(), flag_cases.paired_runs()[:1]
    folder = tmp_path / run.name
    folder.mkdir()
    write_positions(folder, {Bucket(300, 0, 512): 4.0})
    with flag_convergence.Session(options) as session:
        assert not session.make([run])
    assert not (folder / "positions.csv").exists()
    (job,) = FakePool.jobs
    assert job.environment["CUDA_VISIBLE_DEVICES"] == "4,7"
    assert job.environment[flag_rank.ENDS] == "512 2048 8192 32768"
    facts = json.loads((folder / "run.json").read_text())
    assert facts["gpus"] == "4,7" and facts["failed"]


def test_a_log_becomes_a_run_that_compare_reads(tmp_path: Path) -> None:
    run = flag_cases.long_runs()[0]
    log = "\n".join(["using torch", *(LINE.format(i, 4 * i) for i in range(1, 4)), "done"])
    write_positions(tmp_path, {Bucket(2, 0, 512): 4.0, Bucket(2, 512, 1024): 2.0})
    flag_convergence.write_curves(tmp_path, run, log)
    curves = read_run(tmp_path)
    assert curves.loss.tolist() == [10.501, 10.502, 10.503] and curves.validation == {2: 3.0}
    assert curves.step_seconds.tolist() == [0.5125] * 3 and curves.loss_tokens == 16384
    facts = read_recipe_facts(tmp_path)
    assert facts is not None and (facts.vocab_size, facts.dtype) == (32768, "bf16")


def test_gradients_that_megatron_saved_are_kept(tmp_path: Path) -> None:
    saved = tmp_path / "work" / "wgrads" / "iter_0000201"
    saved.mkdir(parents=True)
    state = {"model_chunk0": {"embedding.weight": torch.ones(3, 2), "bias": torch.zeros(4)}}
    torch.save(state, saved / "mp_rank_00.pth")
    flag_convergence.keep_gradients(tmp_path / "run", tmp_path / "work")
    found = read_wgrads(tmp_path / "run", 201)
    assert found["embedding.weight"][0].tolist() == [[1.0, 1.0]] * 3
    assert found["bias"][0].shape == (4,)
    assert not (tmp_path / "work").exists()


def test_deterministic_gradients_are_measured_beside_deterministic_stock(tmp_path: Path) -> None:
    values = {"te_p2p": 1.0, "te_a2a": 3.0, "magi": 2.5, "magi_deterministic": 5.0,
              "deterministic_te_p2p": 4.0}  # fmt: skip
    for name, value in values.items():
        saved = tmp_path / "work" / "wgrads" / "iter_0000001"
        saved.mkdir(parents=True)
        state = {"model_chunk0": {"weight": torch.full((2,), value)}}
        torch.save(state, saved / "mp_rank_00.pth")
        flag_convergence.keep_gradients(tmp_path / name, tmp_path / "work")
    flag_convergence.compare_gradients(tmp_path)
    errors = {n: read_errors(tmp_path / n)[0].relative_error for n in values if "ic_te" not in n}
    wanted = {"te_p2p": 2 / 3, "te_a2a": 2.0, "magi": 0.25, "magi_deterministic": 0.25}
    assert errors == pytest.approx(wanted)
    assert not list(tmp_path.glob("*/wgrads"))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_losses_are_counted_by_position() -> None:
    losses = flag_rank.PositionLosses((2, 4, 8, 16))
    for scale in (1.0, 3.0):
        losses.add(scale * torch.tensor([[7.0, 1.0, 2.0, 5.0]]), torch.tensor([[7, 0, 1, 2]]))
    wanted = {Bucket(5, 0, 2): 3.0, Bucket(5, 2, 4): 10.0, Bucket(5, 4, 8): 14.0}
    assert losses.means(5) == wanted
    losses.clear()
    assert losses.means(6) == {}


def test_the_corpus_has_exactly_its_tokens(tmp_path: Path) -> None:
    documents = iter([[1, 2], [3], [4, 5, 6]])
    end = flag_cases.EOD
    assert [*code_corpus.cut(documents, 6)] == [[1, 2, end], [3, end], [4]]
    with pytest.raises(UsageError, match="3 more tokens"):
        [*code_corpus.cut(iter([[1, 2]]), 6)]
    for name, text in (("b.py", "x = 1"), ("a.py", "y = 2"), ("same.py", "x = 1"), ("no.txt", "")):
        (tmp_path / name).write_text(text)
    (tmp_path / "table.py").write_text("1," * code_corpus.MOST_BYTES)
    assert {p.name for p in code_corpus.shuffled_files([tmp_path])} == {"a.py", "b.py"}


def test_steps_are_rows_of_a_training_run(tmp_path: Path) -> None:
    flag_convergence.write_curves(tmp_path, flag_cases.controls()[0], LINE.format(1, 4))
    with (tmp_path / "steps.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["consumed_samples"] == "2" and row["num_processes"] == "2"
    assert row["validation_loss"] == "" and row["grad_norm"] == "3.125"


FLEX = """
import torch
from types import SimpleNamespace
from benchmarks.train import pretrain_flex as flex

flex.compiled = lambda: flex.flex_attention
core = flex.FlexDocuments.__new__(flex.FlexDocuments)
torch.manual_seed(0)
q, k, v = (torch.randn(256, heads, 16, dtype=torch.float64) for heads in (4, 2, 2))
packed = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 100, 130, 256], dtype=torch.int32))
out = flex.FlexDocuments.forward(core, q, k, v, None, packed_seq_params=packed)
row = torch.arange(256)
document = (row[:, None] >= packed.cu_seqlens_q[1:3]).sum(1)
sees = (document[:, None] == document) & (row[:, None] >= row)
wanted = torch.nn.functional.scaled_dot_product_attention(
    *(x.transpose(0, 1) for x in (q, k, v)), attn_mask=sees, enable_gqa=True)
torch.testing.assert_close(out, wanted.transpose(0, 1), rtol=1e-6, atol=1e-6)
inside = flex.layer_spec.submodules.self_attention.submodules.core_attention
assert inside is flex.FlexDocuments
"""


def test_the_baseline_of_documents_is_right() -> None:
    """On the CPU, with names of TransformerEngine alone: its layers run on GPUs."""
    stand_ins = ROOT / "tests" / "stand_ins"
    paths = os.pathsep.join([str(stand_ins), str(ROOT), os.environ.get("PYTHONPATH", "")])
    program = f"from megatron_magi import adapter\n{FLEX}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def test_runs_of_a_seed_differ_in_attention_alone() -> None:
    runs = {run.name: run for run in flag_cases.paired_runs()}
    assert len(runs) == 5 * len(flag_cases.SEEDS)
    kinds = ("te", "te_a2a", "magi", "right_mask", "near_block")
    attention = {"attention-backend", "cp-comm-type", "magi-mask"}
    for seed in flag_cases.SEEDS:
        flags = [runs[f"paired_{kind}_{seed}"].flags for kind in kinds]
        shared = [{k: v for k, v in f.items() if k not in attention} for f in flags]
        assert all(others == shared[0] for others in shared) and shared[0]["seed"] == seed


@pytest.mark.parametrize(
    ("made", "size"), [(flag_masks.near_tile, 128), (flag_masks.near_block, 4096)]
)
def test_the_mask_that_is_given_is_the_right_one(made: MaskFunction, size: int) -> None:
    """For every sample of a microbatch, which the flag joins to one stream."""
    length = 2 * size
    request = MaskRequest((0, length, 2 * length), None)
    right = flag_masks.right_mask(request)
    assert right == masks.from_cu_seqlens([0, length, 2 * length])
    dense = right.to_dense()
    for start in (0, length):
        dense[start + size : start + length, start : start + size] = False
    assert np.array_equal(made(request).to_dense(), dense)
