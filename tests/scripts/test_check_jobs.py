"""Published jobs are found, read, joined and counted as they stand in a checkout."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="reads jobs in YAML")

import check_jobs
from published_jobs.bridge import read_recipes, sets_of
from published_jobs.examples import find_examples
from published_jobs.jobs import Job, find_tests, flags_of, without_repeats, words_of
from published_jobs.rules import key_of, reasons
from published_jobs.table import SETS, Row, counts, table

from megatron_magi.launcher.megatron_flags import RaisingParser

GOOD = "MODEL_ARGS:\n  --num-layers: 4\n  --bf16: true\n  --attention-backend: flash\n"

TESTS = {
    "gpt/good": GOOD,
    "gpt/good_resumed": "TEST_TYPE: ckpt-resume\n" + GOOD,
    "gpt/one_reason": GOOD + "  --modelopt-enabled: true\n  --context-parallel-size: 2\n",
    "moe/two_reasons": (
        "TEST_TYPE: release\n" + GOOD + "  --modelopt-enabled: true\n  --enable-cuda-graph: true\n"
    ),
    "gpt/unreadable": GOOD + "  --num-layers: some\n",
    "gpt/chat": "MODE: inference\n" + GOOD,
    "gpt/other_script": GOOD,
    "gpt-nemo/llama": GOOD,
    "t5/small": GOOD,
}
"""A test by its folder, with its settings."""

RECIPE = """
spec: {model: gpt, script: 'TRAINING_SCRIPT_PATH=%s'}
products:
  - test_case: [%s]
    products: [{scope: [%s]}]
"""

RECIPES = {
    "ours.yaml": RECIPE % ("pretrain_gpt.py", "good_resumed", "mr-broken, mr"),
    "broken.yaml": RECIPE % ("pretrain_gpt.py", "one_reason", "mr-broken"),
    "other.yaml": RECIPE % ("examples/rl/train.py", "other_script", "mr"),
}

EXAMPLES = {
    "plain.sh": (
        "mkdir -p $1/logs\n"
        "ARGS=(--num-layers 2 \"--split '99,1'\" --bf16)\n"
        "torchrun --nproc_per_node 8 pretrain_gpt.py ${ARGS[@]}\n"
    ),
    "submits.sh": (
        'CMD="\ncd x;\nnsys profile python -u /x/pretrain_hybrid.py --num-layers 3"\n'
        'sbatch <<EOF\nsrun -l \\\\\n  bash -c "${CMD}" 2>&1 | tee log\nEOF\n'
    ),
    "asks_first.sh": (
        '[ "$1" = --checkpoint-path ] || exit 1\npython -m x pretrain_gpt.py --num-layers 4\n'
    ),
    "sourced.sh": "NAME=pretrain_gpt.py\n",
    "waits.sh": "sleep 60; torchrun pretrain_gpt.py --num-layers 5\n",
    "of_bert.sh": "torchrun pretrain_bert.py\n",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in TESTS.items():
        path = tmp_path / "tests/functional_tests/test_cases" / name / "model_config.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    for folder, files in (("tests/test_utils/recipes/h100", RECIPES), ("examples/a", EXAMPLES)):
        (tmp_path / folder).mkdir(parents=True)
        for name, text in files.items():
            (tmp_path / folder / name).write_text(text)
    return tmp_path


def parser() -> argparse.ArgumentParser:
    """A small Megatron: some flags, and what the rules read besides."""
    small = RaisingParser(allow_abbrev=False)
    for name in ("--num-layers", "--context-parallel-size"):
        small.add_argument(name, type=int, default=1)
    for name in ("--bf16", "--modelopt-enabled", "--enable-cuda-graph"):
        small.add_argument(name, action="store_true")
    small.add_argument("--attention-dropout", type=float, default=0.1)
    small.set_defaults(
        tensor_model_parallel_size=1, pipeline_model_parallel_size=1, sequence_parallel=False,
        position_embedding_type="rope", apply_rope_fusion=True, reset_attention_mask=False,
        transformer_impl="transformer_engine", calculate_per_token_loss=False, micro_batch_size=1,
        seq_length=64, moe_router_load_balancing_type="aux_loss",
    )  # fmt: skip
    return small


def test_jobs_of_our_scripts_are_found(checkout: Path) -> None:
    found = find_tests(checkout)
    jobs = {job.name: job for job in found.jobs}
    assert set(jobs) == {name for name in TESTS if name.startswith(("gpt/", "moe/"))} - {
        "gpt/chat",
        "gpt/other_script",
    }
    assert found.left_out == {
        "inference": 1,
        "run by train.py": 1,
        "run by nemo": 1,
        "run by a script for t5": 1,
    }
    assert [name for name, job in jobs.items() if job.is_active] == ["gpt/good_resumed"]
    assert [name for name, job in jobs.items() if job.is_release] == ["moe/two_reasons"]


def test_the_tables_count(checkout: Path) -> None:
    jobs = without_repeats(find_tests(checkout).jobs)
    rows, unread = check_jobs.rows_of(jobs, parser())
    assert {row.name: row.reasons for row in rows} == {
        "gpt/good": (),
        "gpt/one_reason": ("--modelopt-enabled",),
        "moe/two_reasons": ("--enable-cuda-graph", "--modelopt-enabled"),
    }
    assert list(unread) == ["gpt/unreadable"] and "invalid int value" in unread["gpt/unreadable"]
    assert counts(rows) == {"--modelopt-enabled": (2, 1), "--enable-cuda-graph": (1, 0)}
    lines = list(table(rows, SETS))
    assert "| all | 4 | 3 | 1 (33%) | 2 | 3 |" in lines
    assert "| in an active CI recipe | 2 | 1 | 1 (100%) | 0 | 1 |" in lines
    assert "| context parallelism > 1 | 1 | 1 | 0 (0%) | 1 | 1 |" in lines
    assert "| release | 1 | 1 | 0 (0%) | 1 | 1 |" in lines
    assert "| examples | 0 | 0 | 0 | 0 | 0 |" in lines
    assert "| `--modelopt-enabled` | 2 | 1 |" in lines


def test_words_that_the_parser_lacks_are_told() -> None:
    row = check_jobs.row_of(
        Job("a", "test", "pretrain_gpt.py", ("--num-layers", "2", "3")), parser()
    )
    assert row.strays == ("3",) and row.reasons == ()


def test_transformer_engine_counts_as_present() -> None:
    args = parser().parse_args([])
    args.attention_dropout = 0.0
    assert reasons(args) == {}
    args.transformer_impl = "inference_optimized"
    assert list(reasons(args)) == ["--transformer-impl"]


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("--attention-backend magi requires a=0, got 1 (--some-flag); set it", "--some-flag"),
        ("--attention-backend magi requires --micro-batch-size 1 beside", "--micro-batch-size"),
        ("no flag at all", "no flag at all"),
    ],
)
def test_a_reason_has_a_stable_name(line: str, key: str) -> None:
    assert key_of(line) == key


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"qk_clip": True, "tensor_model_parallel_size": 2}, "--qk-clip"),
        ({"mtp_hsm": True, "context_parallel_size": 2}, "--mtp-hsm"),
        ({"pipeline_model_parallel_layout": "Et*7|tm|L"}, "--pipeline-model-parallel-layout"),
        ({"qk_clip": True, "mtp_hsm": True, "pipeline_model_parallel_layout": "Et*7|tmL"}, None),
    ],
)
def test_what_the_model_refuses_counts_too(given: dict[str, object], key: str | None) -> None:
    args = parser().parse_args(["--attention-dropout", "0"])
    vars(args).update(given)
    assert list(reasons(args)) == ([key] if key else [])


def test_words_are_those_of_the_test_runner() -> None:
    settings = {
        "--bf16": "true",
        "--lr": "1.0e-5",
        "--spec": "[module function]",
        "--moe-layer-freq": "([0]*3+[1]*58)",
        "--schedule": "0:384 200B:768",
        "--seed": "${REPEAT}",
        "--load": "${PATH_OF_USER}/x",
        "--auto-detect": None,
    }
    assert " ".join(words_of(settings)) == (
        "--bf16 --lr 1.0e-5 --spec module function --moe-layer-freq ([0]*3+[1]*58) "
        "--schedule 0:384 200B:768 --seed 1 --load ${PATH_OF_USER}/x"
    )
    assert "0:384 200B:768" in list(words_of(settings))


def test_repeats_have_equal_flags_in_any_order() -> None:
    words = [("--a", "1", "--b", "2"), ("--b", "2", "--a=1"), ("--a", "2", "--b", "1")]
    jobs = [Job(str(i), "test", "pretrain_gpt.py", text) for i, text in enumerate(words)]
    assert [(job.name, job.num_places) for job in without_repeats(jobs)] == [("0", 2), ("2", 1)]
    assert flags_of(["--a", "1", "2", "--b=3"]) == [("--a", "1", "2"), ("--b", "3")]


def test_examples_are_run_with_stubs(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("published_jobs.examples.TIME_LIMIT_S", 2.0)
    before = sorted(checkout.rglob("*"))
    found = find_examples(checkout)
    assert {job.name: (job.script, *job.words) for job in found.jobs} == {
        "a/plain.sh": (
            "pretrain_gpt.py", "--num-layers", "2", "--split", "99,1", "--bf16"
        ),
        "a/submits.sh": ("pretrain_hybrid.py", "--num-layers", "3"),
        "a/asks_first.sh": ("pretrain_gpt.py", "--num-layers", "4"),
    }  # fmt: skip
    assert found.left_out == Counter({"example that starts nothing by itself": 2})
    assert sorted(checkout.rglob("*")) == before


def test_the_record_has_a_line_a_row(tmp_path: Path) -> None:
    rows = [Row("a", "test", ("cp",), ("--x",), dropout=0.1), Row("b", "example")]
    check_jobs.write_record(tmp_path / "r.json", rows, {"megatron": "0.20.0"})
    text = (tmp_path / "r.json").read_text()
    assert json.loads(text)["rows"] == [
        {"name": "a", "kind": "test", "marks": ["cp"], "reasons": ["--x"], "dropout": 0.1},
        {"name": "b", "kind": "example"},
    ]
    assert sum(line.startswith('  {"name"') for line in text.splitlines()) == 2


LLAMA = """
from dataclasses import dataclass
from megatron.bridge import AutoBridge
from megatron.bridge.training.config import ConfigContainer, DDP
from .shared import common

@dataclass
class Precision:
    fp8_dot_product_attention: bool = True

def llama_good_config() -> ConfigContainer | None:
    cfg = common(ConfigContainer, DDP)
    cfg.model = AutoBridge.from_hf_pretrained("x").to_megatron_provider(load_weights=False)
    if cfg.model.context_parallel_size > 1 or cfg.model.cuda_graph_impl:
        raise AssertionError("a field that was never set")
    return cfg

def llama_bad_config():
    cfg = llama_good_config()
    cfg.model.cuda_graph_impl, cfg.model.context_parallel_size = "full_iteration", 2
    cfg.ddp.average_in_collective = True
    cfg.model.pipeline_model_parallel_layout = [["embedding"], ["mtp"], ["loss"]]
    cfg.mixed_precision = Precision()
    return cfg

def fails_config():
    raise NotImplementedError("never")

def _private_config():
    raise AssertionError("private")
"""

SHARED = """
def common(container, ddp):
    return container(model=None, ddp=ddp(average_in_collective=False))
"""


def test_recipes_of_bridge_are_read_without_its_packages(tmp_path: Path) -> None:
    package = tmp_path / "src/megatron/bridge"
    files = {
        "recipes/llama/h100/llama.py": LLAMA,
        "recipes/llama/h100/shared.py": SHARED,
        "perf_recipes/nemotronh/gb200/nemotronh.py": "def a_config():\n    return None\n",
        "training/config.py": "raise AssertionError('a stand-in takes its place')\n",
    }
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
        (package / name).with_name("__init__.py").touch()
    rows, unread = read_recipes(tmp_path, parser().parse_args([]))
    assert {row.name: row.reasons for row in rows} == {
        "recipes.llama.h100.llama.llama_good_config": (),
        "recipes.llama.h100.llama.llama_bad_config": (
            "--cuda-graph-impl",
            "--fp8-dot-product-attention",
            "--pipeline-model-parallel-layout",
        ),
        "perf_recipes.nemotronh.gb200.nemotronh.a_config": (),
    }
    assert unread == {"recipes.llama.h100.llama.fails_config": "NotImplementedError: never"}
    lines = list(table(rows, sets_of(rows, "recipes")))
    assert "| of these for h100 | 2 | 2 | 1 (50%) | 1 | 0 |" in lines
    assert not any(name.startswith("megatron.bridge") for name in sys.modules)
