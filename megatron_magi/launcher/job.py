"""A pretrain job's command line, read and judged as the launcher would, without starting it."""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import io
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron_magi.adapter import MEGATRON_VERSION
from megatron_magi.config import MagiConfig
from megatron_magi.launcher.cpu import (
    install_cpu_training,
    no_training_program,
    skip_compilation_of_wheels,
)
from megatron_magi.launcher.flags import Options, take_flags
from megatron_magi.launcher.hook_points import HookError, check
from megatron_magi.launcher.job_sizes import heads_of
from megatron_magi.launcher.launch import Launch
from megatron_magi.launcher.machine_refusals import kernel_here, machine_refusals
from megatron_magi.launcher.refusals import refusals
from megatron_magi.launcher.settings import any_seq_length, change_settings, take_settings


class RefusedJob(Exception):
    """A job that does not start; one line for each reason."""

    def __init__(self, lines: Sequence[str], about_machine: bool = False) -> None:
        super().__init__("\n".join(lines))
        self.lines = list(lines)
        self.about_machine = about_machine
        """Whether some of the lines are about this machine, and need not hold on another."""


class RaisingParser(argparse.ArgumentParser):
    """Raises where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


@dataclass(frozen=True)
class Job:
    """A command line with our switch, read by both parsers."""

    args: Any
    """Megatron's arguments, before `validate_args`."""
    options: Options

    @property
    def model_size(self) -> int:
        """Ranks that hold one copy of the model's work: tensor x pipeline x context parallel."""
        a = self.args
        sizes = (a.tensor_model_parallel_size, a.pipeline_model_parallel_size)
        return int(sizes[0] * sizes[1] * a.context_parallel_size)

    @property
    def config(self) -> MagiConfig:
        return self.options.config


@dataclass(frozen=True)
class Accepted:
    """What is known of a job that our rules let start."""

    gpus: int
    tp: int
    pp: int
    cp: int
    dp: int
    layers: str
    """Megatron's --transformer-impl."""
    heads: str
    """Query heads / key heads x head dimension on one tensor-parallel rank."""
    kernel: str | None
    """What computes attention on this machine; None for a job of another machine."""
    megatron: str
    """The version whose parser read the job."""


def prepare_megatron() -> None:
    """Make the training program importable here, and compare it with the launcher's hooks.

    Raises:
        ImportError: a megatron-core without the training program.
        RefusedJob: a Megatron whose code is not what the launcher knows.
    """
    skip_compilation_of_wheels()
    install_cpu_training()
    megatron_parser()
    try:
        check(MEGATRON_VERSION)
    except HookError as error:
        raise RefusedJob([f"megatron_magi: {error}"]) from error


@functools.cache
def megatron_parser() -> argparse.ArgumentParser:
    """The parser of Megatron's training scripts, ModelOpt's flags among them.

    Raises:
        ImportError: a megatron-core without the training program.
    """
    try:
        from megatron.training.arguments import add_megatron_arguments
    except ModuleNotFoundError as error:
        raise ImportError(no_training_program()) from error
    parser: argparse.ArgumentParser = add_megatron_arguments(RaisingParser(allow_abbrev=False))
    try:
        from megatron.post_training.arguments import add_modelopt_args
    except ImportError:
        return parser
    with_modelopt: argparse.ArgumentParser = add_modelopt_args(parser)
    return with_modelopt


def read_job(flags: Sequence[str]) -> Job:
    """The flags behind a pretrain script's name, parsed by our parser and by Megatron's.

    Raises:
        RefusedJob: flags that one of the parsers does not take, or none of them switches ours on.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            options, rest = take_flags(flags)
    except SystemExit as error:
        raise RefusedJob(said.getvalue().splitlines()[-1:]) from error
    if options is None:
        raise RefusedJob([
            "a job with --attention-backend magi is required, got none, or another one behind it: "
            "it would run with Megatron's own attention; add the flag"
        ])  # fmt: skip
    try:
        return Job(megatron_parser().parse_args(rest), options)
    except ValueError as error:
        raise RefusedJob([
            f"flags of Megatron {MEGATRON_VERSION} are required, got: {error}; mend them, and "
            f"leave out those that your script adds itself"
        ]) from error  # fmt: skip


def judge(job: Job, gpus: int | None = None, *, here: bool = True) -> Accepted:
    """Put a job through the launcher's rules, and then through Megatron's own checks.

    Args:
        gpus: processes of the job; default: as many as its parallel sizes need.
        here: whether it runs on this machine; else the rules about the machine are left out.

    Raises:
        RefusedJob: with all refusals of the launcher at once, or with Megatron's first one.
    """
    count = job.model_size if gpus is None else gpus
    of_job = refusals(job.args, job.config, mask_name=job.options.mask_name, here=False)
    of_job += [*_settings(job), *_world(job, count)]
    of_machine = machine_refusals(job.args, job.config) if here else []
    lines = [*of_job, *of_machine] or _megatrons_own(job, count)
    if lines:
        raise RefusedJob(lines, about_machine=bool(of_machine))
    return _accepted(job, count, here)


def _accepted(job: Job, gpus: int, here: bool) -> Accepted:
    args, heads = job.args, heads_of(job.args)
    return Accepted(
        gpus=gpus,
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        cp=args.context_parallel_size,
        dp=gpus // job.model_size,
        layers=args.transformer_impl,
        heads=f"{heads.num_heads_q}/{heads.num_heads_kv}x{heads.head_dim}",
        kernel=kernel_here(args, job.config) if here else None,
        megatron=str(MEGATRON_VERSION),
    )


def _settings(job: Job) -> list[str]:
    """Our settings that contradict the job's."""
    try:
        take_settings(Launch(job.options), job.args)
    except SystemExit as error:
        return [str(error)]
    return []


def _world(job: Job, gpus: int) -> list[str]:
    if job.model_size < 1:  # which is refused by its parts
        return []
    if gpus >= 1 and gpus % job.model_size == 0:
        return []
    return [
        f"a job of tensor x pipeline x context parallel size {job.model_size} requires a multiple "
        f"of it as GPUs, got {gpus} (--gpus); change one of them"
    ]


def _megatrons_own(job: Job, gpus: int) -> list[str]:
    """Megatron's first error in a check of its own; it reads the environment too."""
    try:
        validated(job.args, gpus)
    except Exception as error:  # whatever it is, the job would end with it
        return [_said_by_megatron(error)]
    return []


def validated(args: Any, gpus: int, *, with_magi: bool = True) -> Any:
    """Returns a copy of Megatron's arguments after `validate_args`, as the job would have them.

    Args:
        args: from Megatron's parser.
        gpus: processes of the job.
        with_magi: whether the launcher changes its settings before; False for a stock job.

    Raises:
        Exception: whatever Megatron raises.
    """
    from megatron.training.arguments import validate_args

    args = copy.deepcopy(args)
    args.rank, args.world_size = 1, gpus  # rank 0 would print its settings
    args._is_global_batch_size_explicitly_specified = args.global_batch_size is not None
    with contextlib.redirect_stdout(io.StringIO()):
        if not with_magi:
            validate_args(args)
            return args
        change_settings(args)
        with any_seq_length(args):
            validate_args(args)
    return args


def _said_by_megatron(error: Exception) -> str:
    """Its words, or the source of an assertion that has none."""
    source = traceback.extract_tb(error.__traceback__)[-1].line
    said = " ".join(str(error).split()) or str(source)
    if not isinstance(error, (AssertionError, ValueError)):
        said = f"{type(error).__name__}: {said}"
    remedy = "mend the flag"
    if "environment" in said:
        remedy = "set the variable here as your job's environment has it"
    return f"Megatron {MEGATRON_VERSION} stops at its own check of the flags: {said}; {remedy}"
