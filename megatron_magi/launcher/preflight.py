"""A pretrain job's command line, read and judged as the launcher would, without starting it."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from megatron_magi.adapter import MEGATRON_VERSION
from megatron_magi.config import MagiConfig
from megatron_magi.core.plan import HeadShape
from megatron_magi.launcher.constraints import refusals
from megatron_magi.launcher.cpu import install_cpu_training, skip_compilation_of_wheels
from megatron_magi.launcher.flags import LauncherOptions, take_flags
from megatron_magi.launcher.hook_points import HookError, check
from megatron_magi.launcher.job_sizes import heads_of, knows_heads, ranks_of_layers, smallest_world
from megatron_magi.launcher.machine_constraints import kernel_here, machine_refusals
from megatron_magi.launcher.megatron_flags import megatron_parser, read_flags
from megatron_magi.launcher.run_needs import run_needs
from megatron_magi.launcher.settings import any_seq_length, change_settings


class JobRejected(Exception):
    """A job that does not start; one line for each reason."""

    def __init__(self, lines: Sequence[str], about_machine: bool = False) -> None:
        super().__init__("\n".join(lines))
        self.lines = list(lines)
        self.about_machine = about_machine
        """True if some of the lines are about this machine, and need not hold on another."""


@dataclass(frozen=True)
class Job:
    """A command line with magi's switch, read by both parsers."""

    args: Any
    """Megatron's arguments, before `validate_args`."""
    options: LauncherOptions
    faults: Sequence[str] = ()
    """One line for each fault of the flags that Megatron's parser found and left out."""

    @property
    def model_size(self) -> int:
        """The least number of GPUs; the job runs on a multiple of it."""
        return smallest_world(self.args)

    @property
    def config(self) -> MagiConfig:
        return self.options.config


@dataclass(frozen=True)
class JobSummary:
    """Facts of a job that passed every rule."""

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
    """The attention kernel of this machine. None means that the job runs on another machine."""
    megatron: str
    """The version whose parser read the job."""


def prepare_megatron() -> None:
    """Make the training program importable here, and compare it with the launcher's hooks.

    Raises:
        ImportError: a megatron-core without the training program.
        JobRejected: a Megatron whose code is not what the launcher knows.
    """
    skip_compilation_of_wheels()
    install_cpu_training()
    megatron_parser()
    try:
        check(MEGATRON_VERSION)
    except HookError as error:
        raise JobRejected([f"megatron_magi: {error}"]) from error


def read_job(flags: Sequence[str], script: str = "") -> Job:
    """Parse the flags after a pretrain script's name, first ours and then Megatron's.

    Args:
        script: The script's source; a flag that it names is one that it adds itself.

    Raises:
        JobRejected: magi's own flags are wrong, or none of them switches magi on.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            options, rest = take_flags(flags)
    except SystemExit as error:
        raise JobRejected(said.getvalue().splitlines()[-1:]) from error
    if options is None:
        raise JobRejected([
            "a job with --attention-backend magi is required, got none, or another backend: it "
            "would run with Megatron's own attention; add the flag, or replace the other one"
        ])  # fmt: skip
    args, faults = read_flags(rest, script)
    return Job(args, options, tuple(faults))


def preflight(job: Job, gpus: int | None = None, *, here: bool = True) -> JobSummary:
    """Put a job through the launcher's rules, and then through Megatron's own checks.

    Args:
        gpus: processes of the job; default: as many as its parallel sizes need.
        here: whether it runs on this machine; else the rules about the machine are left out.

    Raises:
        JobRejected: with all refusals of the launcher at once, or with Megatron's first one.
    """
    count = job.model_size if gpus is None else gpus
    rules = refusals(
        job.args,
        job.config,
        mask_name=job.options.mask_name,
        balance_step=job.options.balance_step,
        here=False,
    )
    rules += [*_world(job, count), *run_needs(job.args)]
    of_machine = machine_refusals(job.args, job.config) if here else []
    lines = [*job.faults, *([*rules, *of_machine] or _megatrons_own(job, count, here))]
    if lines:
        raise JobRejected(lines, about_machine=bool(of_machine))
    return _accepted(job, count, here)


def _accepted(job: Job, gpus: int, here: bool) -> JobSummary:
    args, heads = job.args, heads_of(job.args)
    return JobSummary(
        gpus=gpus,
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        cp=args.context_parallel_size,
        dp=gpus // ranks_of_layers(args)[0],
        layers=args.transformer_impl,
        heads=_shown(heads),
        kernel=kernel_here(args, job.config) if here else None,
        megatron=str(MEGATRON_VERSION),
    )


def _shown(heads: HeadShape) -> str:
    """Query heads / key heads x head dimension, and that of values if it is another one."""
    shown = f"{heads.num_heads_q}/{heads.num_heads_kv}x{heads.head_dim}"
    return shown if heads.value_dim == heads.head_dim else f"{shown} (values {heads.value_dim})"


def _world(job: Job, gpus: int) -> list[str]:
    least = job.model_size
    if least < 1:  # which is refused by its parts
        return []
    if gpus >= 1 and gpus % least == 0:
        return []
    dense, experts = ranks_of_layers(job.args)
    sizes = f"tensor x pipeline x context parallel size {dense}"
    if least != dense:
        sizes += f" and expert-tensor x expert x pipeline parallel size {experts}"
    return [
        f"a job of {sizes} requires a multiple of {least} as GPUs, got {gpus} (--gpus); change one "
        f"of them"
    ]


def _megatrons_own(job: Job, gpus: int, here: bool) -> list[str]:
    """Megatron's first error in `validate_args` after magi's settings, as the launcher calls it, or
    in what is built from the flags after it; it reads the environment too. The model's config also
    asks what is installed, so that it is made on the job's own machine alone."""
    try:
        with silence():
            args = validated(job.args, gpus)
            if here:
                _configure_model(args)
            _build_schedule(args)
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


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Drop what Megatron prints and logs."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(level)


def _configure_model(args: Any) -> None:
    """Make Megatron's config of the model, which has checks of its own."""
    from megatron.training import arguments

    if knows_heads(args):  # else a checkpoint, or a script of another model, brings the sizes
        arguments.core_transformer_config_from_args(args)


def _build_schedule(args: Any) -> None:
    """Build Megatron's schedule of the learning rate, which has checks of its own."""
    from megatron.training import training

    original = training.get_args
    training.get_args = lambda: args
    try:
        if not args.skip_train:
            training.get_optimizer_param_scheduler(SimpleNamespace(param_groups=[]))
    finally:
        training.get_args = original


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
