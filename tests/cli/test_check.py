"""`megatron-magi check`: a job's flags, Megatron's parser, the launcher's rules, no start."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import megatron_magi.adapter
from benchmarks.train.pretrain_cases import words
from megatron_magi.cli import check
from megatron_magi.launcher import job_plans, preflight
from tests.cli.command import Capture, run
from tests.launcher.layouts import MLA, MOE
from tests.launcher.tiny_flags import TINY
from tests.megatron_worker import NO_COMPILER

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SWITCH = ["--attention-backend", "magi"]
SCRIPT = str(ROOT / "tests" / "launcher" / "pretrain_small.py")
TINY_JOB = [SCRIPT, *words(TINY), *SWITCH]
WITHOUT_GROUPS = {name: value for name, value in TINY.items() if "group" not in name}
BALANCE = ["--magi-balance-step"]
CP2 = ["--context-parallel-size", "2"]
HAS_TRAINING = megatron_magi.adapter.MEGATRON_VERSION[:2] == (0, 19)

EXPERTS = words({**MOE, "num-experts": 8, "expert-model-parallel-size": 8, "global-batch-size": 24})
WIDE = {**MLA, "qk-head-dim": 128, "qk-pos-emb-head-dim": 200}
FORK = [
    *("--no-async-tensor-model-parallel-allreduce", "--zero-stage", "1", "--frobnicate"),
    *("--rotary-base", "500000.0", "--num-atention-heads", "4", "--fp8-e4m3"),
]
NOTHING = dict.fromkeys(("train-iters", "mock-data", "vocab-size", "lr"))
LACKS = {
    "length": (["train-iters"], "a run requires --train-iters or --train-samples, got none"),
    "data": (["mock-data"], "a run requires data, got neither --data-path nor another flag of"),
    "vocabulary": (["vocab-size"], "NullTokenizer requires a vocabulary, got no --vocab-size"),
    "tokenizer": (["tokenizer-type"], "GPT2BPETokenizer requires a vocabulary, got no --vocab-f"),
    "rate": (["lr"], "a run requires --lr, got none"),
}

COMMANDS = {
    "accepted": ["--", *TINY_JOB, *CP2],
    "no interval": ["--", SCRIPT, *words({**TINY, "eval-interval": None}), *SWITCH],
    "no groups": ["--", SCRIPT, *words(WITHOUT_GROUPS), *SWITCH],
    "torchrun": ["--gpus", "4", "torchrun", "-m", "megatron_magi.run", *TINY_JOB, *CP2],
    "json": ["--json", "--", *TINY_JOB, *CP2],
    "quiet": ["--quiet", "--", *TINY_JOB],
    "rules": ["--", *TINY_JOB, "--yaml-cfg", "a", "--attention-dropout", "0.1"],
    "refused json": ["--json", "--", *TINY_JOB, "--yaml-cfg", "a"],
    "machine": ["--", *TINY_JOB, "--transformer-impl", "transformer_engine"],
    "elsewhere": ["--elsewhere", "--", *TINY_JOB, "--transformer-impl", "transformer_engine"],
    "balanced": ["--gpus", "2", "--", *TINY_JOB, *BALANCE, "--reset-attention-mask"],
    "no documents": ["--gpus", "2", "--", *TINY_JOB, *BALANCE],
    "own loader": ["--", *TINY_JOB, *BALANCE, "--sft", "--dataloader-type", "external"],
    "megatron": ["--gpus", "4", "--", *TINY_JOB, "--global-batch-size", "3"],
    "wordless": ["--", *TINY_JOB, "--hidden-size", "66"],
    "environment": ["--", *TINY_JOB, *CP2],
    "gpus": ["--gpus", "3", "--", *TINY_JOB, *CP2],
    "no gpus": ["--gpus", "0", "--", *TINY_JOB],
    "experts": ["--gpus", "2", "--", *TINY_JOB, *EXPERTS],
    "all experts": ["--", *TINY_JOB, *EXPERTS],
    "expert tensors": ["--", *TINY_JOB, *EXPERTS, "--expert-tensor-parallel-size", "3"],
    "latent": ["--", SCRIPT, *words({**TINY, **MLA}), *SWITCH],
    "latent kernel": ["--", SCRIPT, *words({**TINY, **WIDE}), *SWITCH, "--magi-kernel", "cuda"],
    "no script": ["--", "pretrain_gtp.py", *words(TINY), *SWITCH],
    "strange flag": ["--", *TINY_JOB, "--frobnicate"],
    "own flag": ["--", *TINY_JOB, "--dense-mask", "a:b"],
    "flags of a fork": ["--", *TINY_JOB, *FORK, "--attention-dropout", "0.1"],
    "stray word": ["--", *TINY_JOB, "--num-layers", "2", "3"],
    "our flag": ["--", *TINY_JOB, "--magi-transprot", "auto"],
    "recipe": ["--", SCRIPT, "--recipe", str(HERE / "job.yaml"), *SWITCH, *CP2],
    "no recipe": ["--", SCRIPT, "--recipe", "none.yaml", *SWITCH],
    "no switch": ["--", SCRIPT, *words(TINY)],
}
COMMANDS |= {
    name: ["--", SCRIPT, *words({**TINY, **dict.fromkeys(left_out)}), *SWITCH]
    for name, (left_out, _) in LACKS.items()
}
OF_A_FILE = {"mock-data": None, "data-path": "absent", "eval-iters": 2}
EXTERNAL = "100,0,0 external"
SPLITS = {"100,0,0": True, "1": True, "98,2,0": False, "0.98,0.02": False, EXTERNAL: False}
"""Jobs that validate; True if Megatron's data set lacks documents for it."""
COMMANDS |= {
    split: ["--", SCRIPT, *words({**TINY, **OF_A_FILE, "split": split.split()[0]}), *SWITCH]
    for split in SPLITS
}
COMMANDS[EXTERNAL] += ["--dataloader-type", "external"]
COMMANDS["nothing"] = ["--", SCRIPT, *words({**TINY, **NOTHING}), *SWITCH]
DRIVER = """
import contextlib, io, json, os, sys
from megatron_magi.cli import main
for number, (name, words) in enumerate(json.load(sys.stdin).items()):
    if number == 1:  # the first command has prepared Megatron
        from tests.launcher.read_docstrings import read_docstrings_once
        read_docstrings_once()
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8" if name == "environment" else "1"
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["check", *words])
    print(json.dumps([name, {"code": code, "out": out.getvalue(), "err": err.getvalue()}]))
"""
"""All commands in one process of their own, because the command prepares Megatron for the CPU."""


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def done() -> dict[str, Done]:
    if not HAS_TRAINING:
        pytest.skip("the parser is that of megatron.training in the 0.19 wheel")
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DRIVER],
        input=json.dumps(COMMANDS),
        env={**os.environ, **NO_COMPILER, "PYTHONPATH": ":".join(paths)},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    lines: list[tuple[str, Any]] = [json.loads(line) for line in ended.stdout.splitlines()]
    return {name: Done(**result) for name, result in lines}


def test_a_job_is_accepted_with_its_plans(done: dict[str, Done]) -> None:
    found = done["accepted"]
    assert (found.code, found.err, found.out.count("\n")) == (0, "", 7)
    for part in (
        "attention of 1 plan of 96 tokens (each sample is one document):",
        "  balance   fullest rank over the mean 1.0",
        " received by a rank in a layer, ",
        "  buffers   up to 0.000 GiB a rank for keys, values and their gradients in flight",
        " a step, forward and backward (100.0% of causal attention over whole samples)",
        "memory and time of the whole model: start it with ",
    ):
        assert part in found.out
    for part in (
        "accepted: 2 GPUs as tp 1, pp 1, cp 2, dp 1; local layers; heads 4/2x16 on a rank",
        "on this machine; read by Megatron 0.19.2; not known before it starts: ",
    ):
        assert part in found.out


def test_a_job_of_balanced_steps_is_accepted(done: dict[str, Done]) -> None:
    assert "accepted: 2 GPUs as tp 1, pp 1, cp 1, dp 2;" in done["balanced"].out


def test_a_job_without_an_interval_of_validation_gets_a_note(done: dict[str, Done]) -> None:
    found = done["no interval"]
    assert found.code == 0 and "--eval-interval when it sizes its data sets, got none" in found.err


def test_every_head_has_keys_of_its_own_without_the_flag_for_groups(done: dict[str, Done]) -> None:
    assert "heads 4/4x16 on a rank" in done["no groups"].out


def test_words_before_the_script_are_passed_over(done: dict[str, Done]) -> None:
    assert "accepted: 4 GPUs as tp 1, pp 1, cp 2, dp 2;" in done["torchrun"].out


def test_a_recipe_is_read(done: dict[str, Done]) -> None:
    assert "cp 2, dp 1; local layers; heads 4/2x16 on a rank" in done["recipe"].out
    missing = done["no recipe"]
    assert (missing.code, missing.err.count("\n")) == (2, 1)
    assert "error: --recipe requires a YAML file or the name of a packaged" in missing.err


def test_programs_read_the_verdict(done: dict[str, Done]) -> None:
    facts = json.loads(done["json"].out)
    assert facts["accepted"] and (facts["gpus"], facts["cp"], facts["heads"]) == (2, 2, "4/2x16")
    attention = facts["attention"]
    assert attention["tokens"] == 96 and attention["causal_share"] == 1.0
    assert 1.0 <= attention["imbalance"] < 1.2 and 0 < attention["key_rows_received"] < 96
    assert attention["buffer_bytes"] > 0 and attention["flops"] > 0
    assert done["quiet"].out == "accepted\n"
    refused = json.loads(done["refused json"].out)
    assert done["refused json"].code == 1 and not refused["accepted"]
    (line,) = refused["refusals"]
    assert "(--yaml-cfg)" in line


def test_all_refusals_of_the_launcher_are_printed_at_once(done: dict[str, Done]) -> None:
    found = done["rules"]
    assert (found.code, found.err) == (1, "") and found.out == (
        "--attention-backend magi requires attention_dropout=0.0, got 0.1 (--attention-dropout); "
        "set --attention-dropout 0\n"
        "--attention-backend magi requires yaml_cfg=None, got 'a' (--yaml-cfg); write flags\n"
    )


def test_a_job_of_another_machine_is_not_judged_by_this_one(done: dict[str, Done]) -> None:
    if importlib.util.find_spec("transformer_engine"):
        pytest.skip("this machine has TransformerEngine")
    here, elsewhere = done["machine"], done["elsewhere"]
    assert here.code == 1 and "requires TransformerEngine, got none" in here.out
    assert here.err == (
        "note: some of these lines are about this machine; --elsewhere leaves them out\n"
    )
    assert elsewhere.code == 0 and "transformer_engine layers" in elsewhere.out
    assert "kernel not known, as the job runs elsewhere" in elsewhere.out


@pytest.mark.parametrize(
    "name, text",
    [
        ("megatron", "Megatron 0.19.2 stops at its own check of the flags: "),
        ("wordless", "own check of the flags: assert args.hidden_size % args.num_attention_heads"),
        ("environment", "CUDA_DEVICE_MAX_CONNECTIONS to 1; set the variable here as your job's"),
        ("gpus", "context parallel size 2 requires a multiple of 2 as GPUs, got 3 (--gpus)"),
        ("no gpus", "context parallel size 1 requires a multiple of 1 as GPUs, got 0 (--gpus)"),
        ("experts", "expert x pipeline parallel size 8 requires a multiple of 8 as GPUs, got 2"),
        ("strange flag", "flags of Megatron 0.19.2 are required, got unrecognized arguments: --f"),
        ("stray word", "got unrecognized arguments: 3; mend them"),
        ("no documents", "--magi-balance-step requires documents in a sample, got none"),
        ("own loader", "--magi-balance-step requires --dataloader-type single or cyclic, got ex"),
        ("our flag", "got --magi-transprot; the nearest is --magi-transport"),
        ("no switch", "a job with --attention-backend magi is required, got none"),
    ],
)
def test_every_other_reason_is_one_line(done: dict[str, Done], name: str, text: str) -> None:
    found = done[name]
    assert (found.code, found.err, found.out.count("\n")) == (1, "", 1) and text in found.out


def test_experts_take_their_part_of_the_world(done: dict[str, Done]) -> None:
    assert "accepted: 8 GPUs as tp 1, pp 1, cp 1, dp 8;" in done["all experts"].out
    assert "accepted: 24 GPUs as tp 1, pp 1, cp 1, dp 24;" in done["expert tensors"].out


def test_latent_heads_have_two_widths(done: dict[str, Done]) -> None:
    assert "heads 4/4x24 (values 12) on a rank" in done["latent"].out
    assert (
        "got 328 and 12; use the backend 'flex' (--magi-kernel cuda)" in done["latent kernel"].out
    )


@pytest.mark.parametrize("name", LACKS)
def test_what_every_run_needs_is_asked_for(done: dict[str, Done], name: str) -> None:
    found = done[name]
    assert (found.code, found.err, found.out.count("\n")) == (1, "", 1)
    assert LACKS[name][1] in found.out
    assert LACKS[name][1] in done["nothing"].out or name == "tokenizer"


@pytest.mark.parametrize("split", SPLITS)
def test_a_note_names_a_split_without_validation(done: dict[str, Done], split: str) -> None:
    found, note = done[split], "note: Megatron ends at its first validation without documents "
    note += f"for it, got --split {split}; give the second number a share, or pass --eval-iters 0\n"
    assert (found.code, found.err) == (0, note if SPLITS[split] else "")


def test_all_faults_of_flags_come_with_all_refusals(done: dict[str, Done]) -> None:
    found = done["flags of a fork"]
    unknown, value, dropout = found.out.splitlines()
    assert (found.code, found.err) == (1, "")
    assert unknown == (
        "flags of Megatron 0.19.2 are required, got unrecognized arguments: "
        "--no-async-tensor-model-parallel-allreduce (gone: it is the default), --zero-stage (of "
        "DeepSpeed: leave it out), --frobnicate, --num-atention-heads (the nearest is "
        "--num-attention-heads), --fp8-e4m3 (now --fp8-format e4m3); mend them, and leave out "
        "those that your script adds itself"
    )
    assert "--rotary-base: invalid int value: '500000.0'; write 500000; mend it" in value
    assert "(--attention-dropout)" in dropout


def test_flags_that_the_script_names_are_left_to_it(done: dict[str, Done]) -> None:
    assert done["own flag"].code == 0


def test_a_script_that_does_not_exist_is_an_error(done: dict[str, Done]) -> None:
    found = done["no script"]
    assert (found.code, found.out, found.err.count("\n")) == (2, "", 1)
    assert "the script must exist, got 'pretrain_gtp.py' in " in found.err


@pytest.mark.parametrize(
    "given, got",
    [([], "got none;"), (["--", "--lr", "3"], "got --lr 3;"), (["job.sh"], "got job.sh;")],
)
def test_a_script_is_required(capsys: Capture, given: list[str], got: str) -> None:
    code, out, err = run(capsys, "check", *given)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "a pretrain script and its flags are required after --, " + got in err


def test_modules_are_found_beside_the_script_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python has it for a script: a checkout's Megatron stands there."""
    (tmp_path / "pretrain_gpt.py").touch()
    monkeypatch.setattr(sys, "path", ["elsewhere"])
    check._find_modules_like_the_launcher(tmp_path / "pretrain_gpt.py")
    assert sys.path == [str(tmp_path), "", "elsewhere"]


def test_what_megatron_logs_about_the_data_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def plan_job(*_: Any) -> None:
        logging.getLogger("megatron.core").warning("> total number of documents: 11")
        raise job_plans.UnknownMask("no mask")

    monkeypatch.setattr(job_plans, "plan_job", plan_job)
    monkeypatch.setattr(preflight, "validated", lambda *_: None)
    assert check._attention(Mock(), 2) == {"unknown": "no mask"}
    assert not caplog.records
