"""Functions of `variants`' jobs: a job's verdict, and its start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import launcher_jobs
from tiny_flags import TINY

from benchmarks.train.pretrain_cases import words
from megatron_magi.launcher import install  # noqa: F401  before worlds are forked
from megatron_magi.launcher import preflight as launcher_job

os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # which Megatron's checks read


def verdicts(script: str, variants: list[dict[str, Any]]) -> list[list[str]]:
    """The lines with which `check` refuses each variant; none for an accepted one."""
    return [_verdict(script, **each) for each in variants]


def _verdict(script: str, flags: dict[str, Any], world: int) -> list[str]:
    try:
        source = Path(script).read_text()
        job = launcher_job.read_job(words({**TINY, **flags}), source)
        launcher_job.preflight(job, world)
    except launcher_job.JobRejected as refused:
        return refused.lines
    return []


def start(script: str, flags: dict[str, Any]) -> int:
    """Run the job; the number of steps that it did on this rank."""
    seen = launcher_jobs.pretrain(script, flags)
    return len(seen["grad_norm"])
