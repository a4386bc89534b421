"""launch_node.sh trains on two CPU processes; train_slurm.sh says the right thing to srun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_magi.compare.read_run import read_run
from tests.training.small_corpus import ByteTokenizer, Document, pack

pytestmark = pytest.mark.slow  # the own trainer, which is changed no more

ROOT = Path(__file__).parents[2]
NODE, SLURM = ROOT / "scripts" / "launch_node.sh", ROOT / "scripts" / "train_slurm.sh"
Bash = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def bash(tmp_path: Path) -> Bash:
    """Runs a script with this Python, and stand-ins of tmp_path/bin, first on the PATH."""
    first = [str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    path = os.pathsep.join(first)
    base = {**inherited, "PATH": path, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}

    def run(script: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(script), *words],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
            env={**base, "OMP_NUM_THREADS": "1", **variables},
        )

    return run


def stand_in(folder: Path, name: str, script: str) -> None:
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)


def test_one_host_trains_a_packaged_recipe_once(bash: Bash, tmp_path: Path) -> None:
    texts = [bytes(97 + np.random.RandomState(n).randint(0, 8, n)) for n in range(5, 105)]
    documents = (Document(f"d{i}", t) for i, t in enumerate(texts))
    pack(documents, tmp_path / "data", ByteTokenizer())
    overrides = (
        *("model.hidden_size=32", "model.ffn_hidden_size=64", "data.path=data", "name=tiny run"),
        *("data.seq_length=96", "train.iterations=3", "train.global_batch_size=2"),
        "optimizer.warmup_iters=0",
    )
    ran = bash(NODE, "tiny_llama_cpu", *overrides, NPROC="2")
    assert ran.returncode == 0, ran.stderr
    assert "world: 2 processes, tp 1 pp 1 cp 2 dp 1" in ran.stdout
    assert len(read_run(tmp_path / "runs" / "tiny run").loss) == 3
    again = bash(NODE, "tiny_llama_cpu", *overrides, NPROC="2")
    assert again.returncode != 0
    assert again.stderr.count("error: a run from the start needs a name of its own") == 1


@pytest.mark.parametrize("words", [(), ("tiny_llama_cpu",)], ids=["no_recipe", "no_gpu"])
def test_one_host_without_recipe_or_gpu_is_an_error(bash: Bash, words: tuple[str, ...]) -> None:
    ran = bash(NODE, *words)
    assert ran.returncode == 2 and ran.stdout == ""
    says = "got 0 (the GPUs of this host, or NPROC)" if words else "a recipe is needed, got none"
    assert says in ran.stderr and ran.stderr.count("\n") == 1


def test_slurm_starts_one_torchrun_a_node(bash: Bash, tmp_path: Path) -> None:
    stand_in(
        tmp_path, "scontrol", '[ "$*" = "show hostnames gpu[3-4]" ] && printf "gpu3\\ngpu4\\n"'
    )
    stand_in(tmp_path, "srun", f'printf "%s\\n" "$@" >"{tmp_path}/words"')
    job = {
        "SLURM_JOB_NODELIST": "gpu[3-4]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_CPUS_PER_TASK": "64",
        "SLURM_JOB_ID": "77",
    }
    ran = bash(SLURM, "llama3_1b_8gpu_cp8", "name=long run", "checkpoint.interval=20", **job)
    assert ran.returncode == 0, ran.stderr
    words = (tmp_path / "words").read_text().splitlines()
    of_srun, of_torchrun, of_train = (
        words[: words.index("python")],
        words[words.index("torch.distributed.run") + 1 : words.index("megatron_magi")],
        words[words.index("megatron_magi") + 1 :],
    )
    assert {"--ntasks-per-node=1", "--cpus-per-task=64"} <= set(of_srun)
    options = dict(zip(of_torchrun[:-1:2], of_torchrun[1::2], strict=True))
    assert options == {
        "--nnodes": "2",
        "--nproc-per-node": "8",
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": "gpu3:29500",
        "--rdzv-id": "77",
    }
    assert of_train[:3] == ["train", "llama3_1b_8gpu_cp8", "checkpoint.load=auto"]
    assert of_train[-2:] == ["name=long run", "checkpoint.interval=20"], "mine win: they are last"


def test_slurm_words_are_torchruns_and_ours(bash: Bash, tmp_path: Path) -> None:
    """The command of a node as it is, run here: torchrun takes it, and every override is known."""
    stand_in(tmp_path, "scontrol", "echo localhost")
    stand_in(tmp_path, "srun", 'while [ "$1" != python ]; do shift; done; exec "$@" --dry-run')
    job = {
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_JOB_ID": "77",
    }
    ran = bash(SLURM, "tiny_llama_cpu", **job)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("dry run: nothing was started") == 1


def test_slurm_without_a_recipe_is_an_error(bash: Bash) -> None:
    ran = bash(SLURM)
    assert ran.returncode == 2 and "error: a recipe is needed, got none" in ran.stderr


@pytest.mark.parametrize("script", [NODE, SLURM], ids=lambda p: p.stem)
def test_the_script_parses(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
