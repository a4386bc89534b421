"""The recipes of recipes/ and scripts/launch.sh: Megatron and the launcher let them start."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import megatron_magi.adapter
from megatron_magi import recipe
from megatron_magi.launcher.constraints import refusals
from megatron_magi.launcher.preflight import Job, read_job
from tests.megatron_worker import NO_COMPILER

pytestmark = pytest.mark.skipif(
    megatron_magi.adapter.MEGATRON_VERSION[:2] != (0, 19),
    reason="the parser is that of megatron.training in the 0.19 wheel",
)

ROOT = Path(__file__).parents[2]
LAUNCH, SLURM = ROOT / "scripts" / "launch.sh", ROOT / "scripts" / "launch_slurm.sh"
GPUS = {
    "tiny_llama_cpu": 2,
    "llama3_1b_1gpu": 1,
    "llama3_1b_cp2": 2,
    "llama3_1b_cp4": 4,
    "llama3_1b_cp8": 8,
    "llama3_8b_64k_cp8": 8,
    "gpt_oss_like": 8,
    "mixtral_8x7b": 16,
    "mla_moe": 8,
    "packed_sft": 8,
    "video": 8,
}
NEVER_RUN = "NOT" + " RUN"
"""In two parts, so that a search for it finds recipes alone."""
RECORDER = f"""#!{sys.executable}
import json, os, sys
print(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]))
"""
DRIVER = """
import json, sys
from megatron_magi.cli import main
for number, (name, gpus) in enumerate(json.load(sys.stdin).items()):
    if number == 1:  # the first command has prepared Megatron
        from tests.launcher.read_docstrings import read_docstrings_once
        read_docstrings_once()
    data = [] if name == "packed_sft" else ["--mock-data", "--tokenizer-type", "NullTokenizer"]
    job = ["pretrain_gpt", *data, "--recipe", name, "--attention-backend", "magi"]
    main(["check", "--json", "--elsewhere", "--gpus", str(gpus), "--", *job])
"""
"""All checks in one process of their own, because the command prepares Megatron for the CPU."""
SLURM_JOB = {
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_ID": "5",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_SUBMIT_DIR": str(ROOT),
}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves this process's environment alone, whatever a recipe sets."""
    monkeypatch.setattr(os, "environ", {**os.environ, "DATA": "x", "TOKENIZER": "z"})


@pytest.fixture
def launched(tmp_path: Path) -> Any:
    """The words of the command that a script would start."""
    for name in ("torchrun", "srun"):
        (tmp_path / name).write_text(RECORDER)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho node1\necho node2\n")
    (tmp_path / "scontrol").chmod(0o755)

    def words_of(*words: str, script: Path = LAUNCH, **variables: str) -> list[str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
        for name in ("DATA", "TOKENIZER", "MEGATRON", "SAVE"):
            kept.pop(name, None)
        path = f"{tmp_path}:{Path(sys.executable).parent}:{kept['PATH']}"
        done = subprocess.run(
            ["bash", str(script), *words],
            env={**kept, "PATH": path, **variables},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        if done.returncode:
            return [str(done.returncode), done.stderr]
        found: list[str] = json.loads(done.stdout)
        return found

    return words_of


def read(words: list[str]) -> Job:
    """Reads a job as `megatron-magi check` does, from the words of a command."""
    script = next(i for i, word in enumerate(words) if "pretrain_gpt" in word)
    return read_job(recipe.expand(words[script + 1 :]))


def header(name: str) -> str:
    lines = recipe.packaged()[name].read_text().splitlines()
    comments = [line for line in lines[: lines.index("ENV_VARS:")] if line.startswith("#")]
    return " ".join(line.lstrip("# ") for line in comments)


def test_every_recipe_is_listed_and_says_whether_it_ran() -> None:
    assert set(recipe.packaged()) == set(GPUS)
    for name in GPUS:
        text = header(name)
        assert "Machine: " in text and (NEVER_RUN in text) != (" Run: " in text), name
        gpus = {"one": 1, "two": 2, "four": 4, "eight": 8, "sixteen": 16}
        needs = re.search(rf"{NEVER_RUN}: needs (\w+) GPUs", text)
        assert needs is None or gpus[needs[1]] == GPUS[name], name


@pytest.mark.parametrize(
    "more", [{}, {"IMPL": "local", "DATA": "0.3 x 0.7 y", "SAVE": "y", "TOKENIZER": "z"}]
)
@pytest.mark.parametrize("name", GPUS)
def test_a_recipe_starts(name: str, more: dict[str, str], launched: Any) -> None:
    given = {"DATA": "x", "TOKENIZER": "z"} if name == "packed_sft" else {}
    switch = ["--attention-backend", "magi", "--context-parallel-size", "2"]
    flags = ["--seed", "7", *(switch if name == "tiny_llama_cpu" else [])]
    words = launched(name, *flags, **{"GPUS": "4", "MEGATRON": "/megatron", **given, **more})
    assert words[:3] == ["torchrun", "--nproc-per-node", "4"]
    assert words[3:6] == ["-m", "megatron_magi.run", "/megatron/pretrain_gpt.py"]
    os.environ.update(more)
    job = read(words)
    assert refusals(job.args, job.config, here=False) == []
    assert job.args.seed == 7 and GPUS[name] % job.model_size == 0
    assert job.args.async_save == ("SAVE" in more)
    assert job.args.data_path == (more.get("DATA", given.get("DATA", "")).split() or None)


def test_megatron_and_the_launcher_accept_every_recipe() -> None:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DRIVER],
        input=json.dumps(GPUS),
        env={**os.environ, **NO_COMPILER, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [a.get("refusals") for a in answers] == [None] * len(GPUS)
    assert [a["gpus"] for a in answers] == list(GPUS.values())


def test_without_a_checkout_the_packaged_script_is_started(launched: Any) -> None:
    words = launched("tiny_llama_cpu", GPUS="2")
    data = ["--mock-data", "--tokenizer-type", "NullTokenizer"]
    assert words[4:] == ["megatron_magi.run", "pretrain_gpt", *data, "--recipe", "tiny_llama_cpu"]


def test_a_slurm_job_starts_one_torchrun_a_node(launched: Any) -> None:
    words = launched("mixtral_8x7b", MEGATRON="/megatron", **SLURM_JOB)
    assert words[:4] == ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "torchrun"]
    assert words[4:8] == ["--nproc-per-node", "4", "--nnodes", "2"]
    assert words[words.index("--rdzv-endpoint") + 1] == "node1:29500"


def test_sbatch_runs_a_copy_that_finds_the_repository(launched: Any, tmp_path: Path) -> None:
    copy = tmp_path / "slurm_script"
    copy.write_text(SLURM.read_text())
    end = str(int(time.time()) + 7200)
    more = {"SAVE": "y", "SLURM_JOB_END_TIME": end, "SLURM_CPUS_PER_TASK": "64", **SLURM_JOB}
    words = launched("mixtral_8x7b", "--seed", "7", script=copy, **more)
    assert words[:3] == ["srun", "--ntasks-per-node=1", "--cpus-per-task=64"]
    assert int(words[words.index("--exit-duration-in-mins") + 1]) in (104, 105)
    assert words[-2:] == ["--seed", "7"]
    assert launched("mixtral_8x7b", script=copy, **SLURM_JOB)[-1] == "mixtral_8x7b"


@pytest.mark.parametrize("script", [LAUNCH, SLURM], ids=lambda p: p.stem)
def test_a_missing_recipe_is_one_line(launched: Any, script: Path) -> None:
    code, err = launched(script=script)
    assert code == "2" and err.startswith("error: a recipe is required, got none")
    assert err.count("\n") == 1


def test_a_node_without_gpus_is_one_line(launched: Any) -> None:
    code, err = launched("llama3_1b_cp8", CUDA_VISIBLE_DEVICES="")
    assert (code, err) == ("2", "error: one process or more is required, got 0; set GPUS\n")


@pytest.mark.slow
def test_the_tiny_recipe_trains_with_and_without_the_flag(tmp_path: Path) -> None:
    """The packaged script, at CP 1 with Megatron's attention and at CP 2 with this package's."""
    losses, constant = [], ["--lr-decay-style", "constant", "--lr-warmup-iters", "0"]
    switch = ["--attention-backend", "magi", "--context-parallel-size", "2"]
    for gpus, flags in ((1, []), (2, switch)):
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        done = subprocess.run(
            ["bash", str(LAUNCH), "tiny_llama_cpu", "--train-iters", "4", *constant, *flags],
            env={**{k: v for k, v in os.environ.items() if k not in ("DATA", "TOKENIZER")},
                 "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # has torchrun
                 "GPUS": str(gpus), "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            cwd=tmp_path, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        losses.append([float(x) for x in re.findall(r" lm loss: ([\d.E+-]+)", done.stdout)])
    assert "megatron_magi active: kernel reference" in done.stdout
    stock, magi = losses
    assert len(magi) == 4 and magi == pytest.approx(stock, rel=2e-6)
