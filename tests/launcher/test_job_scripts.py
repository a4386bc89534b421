"""The jobs of recipes/pretrain_gpt: Megatron parses them, and our refusals let them start."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import megatron_magi.adapter
from megatron_magi.launcher.job import Job, read_job
from megatron_magi.launcher.refusals import refusals
from tests.launcher.layouts import SMALL_SCRIPT

pytestmark = pytest.mark.skipif(
    megatron_magi.adapter.MEGATRON_VERSION[:2] != (0, 19),
    reason="the parser is that of megatron.training in the 0.19 wheel",
)

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes" / "pretrain_gpt"
JOBS = sorted(path.stem for path in FOLDER.glob("*.sh") if path.stem != "start")
RECORDER = f"""#!{sys.executable}
import json, os, sys
print(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]))
"""


def run(
    job: str, *words: str, path: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    environment |= {"PATH": f"{path}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", str(FOLDER / f"{job}.sh"), *words],
        env={**environment, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.fixture
def recorded(tmp_path: Path) -> Any:
    """What a job would start: its words, without starting it."""
    for name in ("torchrun", "srun"):
        (tmp_path / name).write_text(RECORDER)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho node1\necho node2\n")
    (tmp_path / "scontrol").chmod(0o755)

    def words_of(job: str, *words: str, **variables: str) -> list[str]:
        done = run(job, *words, path=str(tmp_path), **variables)
        assert done.returncode == 0, done.stderr
        (line,) = done.stdout.splitlines()
        found: list[str] = json.loads(line)
        return found

    return words_of


def parsed(words: list[str]) -> Job:
    """A job, read as `megatron-magi check` reads it."""
    script = next(i for i, word in enumerate(words) if word.endswith("pretrain_gpt.py"))
    job = read_job(words[script + 1 :])
    assert not job.faults
    return job


@pytest.mark.parametrize(
    "more", [{}, {"IMPL": "local", "DATA": "x", "SAVE": "y", "TOKENIZER": "z"}]
)
@pytest.mark.parametrize("job", JOBS)
def test_a_job_starts(
    job: str, more: dict[str, str], recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))  # where video.sh has its mask
    given = {"MEGATRON": "/megatron", "DATA": "x", "TOKENIZER": "z"} if job == "packed_sft" else {}
    words = recorded(job, "--seed", "7", **{"MEGATRON": "/megatron", **given, **more})
    gpus = "2" if job == "tiny_cpu" else "8"
    assert words[:3] == ["torchrun", "--nproc-per-node", gpus]
    assert words[3:6] == ["-m", "megatron_magi.run", "/megatron/pretrain_gpt.py"]
    job_read = parsed(words)
    args = job_read.args
    assert refusals(args, job_read.config, here=False) == []
    assert args.seed == 7 and args.context_parallel_size > 1
    assert args.async_save == ("SAVE" in more) and (args.data_path is None) == args.mock_data
    few, many = sorted((int(gpus), job_read.model_size))
    assert many % few == 0  # whole nodes
    assert args.num_layers % args.pipeline_model_parallel_size == 0


def test_the_page_shows_a_whole_job(recorded: Any) -> None:
    page = (ROOT / "docs" / "megatron_lm.md").read_text()
    shown = page.split("```bash\n")[1].split("```")[0].replace("\\\n", " ")
    names = {name: f"${name}" for name in ("MEGATRON", "DATA", "TOKENIZER", "SAVE")}
    assert shlex.split(shown) == recorded("llama3_1b", **names)


def test_a_slurm_job_starts_one_torchrun_a_node(recorded: Any) -> None:
    slurm = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "5"}
    words = recorded("mixtral_8x7b", MEGATRON="/megatron", GPUS="4", **slurm)
    assert words[:4] == ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "torchrun"]
    assert words[4:8] == ["--nproc-per-node", "4", "--nnodes", "2"]
    assert words[words.index("--rdzv-endpoint") + 1] == "node1:29500"
    words = recorded("llama3_8b", MEGATRON="/megatron", SLURM_CPUS_PER_TASK="64", **slurm)
    assert words[:3] == ["srun", "--ntasks-per-node=1", "--cpus-per-task=64"]


@pytest.mark.parametrize("job", JOBS)
def test_a_job_starts_from_the_copy_that_sbatch_runs(job: str, tmp_path: Path) -> None:
    """The copy alone finds nothing beside it; MAGI_JOBS names the folder."""
    copy = tmp_path / "slurm_script"
    copy.write_text((FOLDER / f"{job}.sh").read_text())
    (tmp_path / "torchrun").write_text('#!/bin/sh\necho "$PYTHONPATH"\n')
    (tmp_path / "torchrun").chmod(0o755)
    variables = {"MEGATRON": "/megatron", "DATA": "x", "TOKENIZER": "z", "MAGI_JOBS": str(FOLDER)}
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(copy)], env={**os.environ, **variables, "PATH": path, "PYTHONPATH": ""},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.strip() == (str(FOLDER) if job == "video" else "")


def test_a_job_without_megatron_says_so() -> None:
    done = run("llama3_1b")
    assert done.returncode != 0 and "set MEGATRON to a Megatron-LM checkout" in done.stderr


@pytest.mark.slow
def test_the_tiny_job_trains() -> None:
    paths = [os.environ.get("PYTHONPATH", ""), str(ROOT)]
    done = run(
        "tiny_cpu", SCRIPT=str(SMALL_SCRIPT), PYTHONPATH=os.pathsep.join(filter(None, paths))
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "megatron_magi active: kernel reference, transport all_to_all over gloo, cp 2" in (
        done.stdout
    )
    losses = [float(x) for x in re.findall(r" lm loss: ([\d.E+-]+)", done.stdout)]
    assert len(losses) == 10 and losses[-1] < losses[0]
