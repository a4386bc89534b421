"""Checks that a stock case and its counterpart with magi are the same job but for attention."""

from __future__ import annotations

import os
import re
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

from benchmarks.lib.changed_arguments import ARGUMENTS
from benchmarks.train.pretrain_cases import Case, words
from megatron_magi.launcher.flags import take_flags
from megatron_magi.launcher.preflight import megatron_parser, validated

OF_ATTENTION = {
    "attention_backend": "the kernel of stock's attention",
    "flash_attention_version": "the kernel of stock's attention",
    "cp_comm_type": "stock's way of context parallelism",
    "hierarchical_context_parallel_sizes": "groups of stock's way a2a+p2p",
}
"""Arguments of stock's attention, and what they choose."""
NO_NORM = {"sequence_parallel": "stock's local layers have no norm for it without apex"}
"""Further differences of cases without TransformerEngine's layers."""
NOT_THE_JOB = {
    *("stock", "magi", "te", "again", "sp", "local", "flex", "cudnn", "fa3"),
    *("p2p", "all", "gather", "all_gather", "a2a", "a2a+p2p", "alone", "dealt"),
}
"""Words of a case's name that do not say what is trained."""
CHECKPOINT = "saves"
"""Word of cases that write different checkpoints; their losses alone count."""


def pairs(cases: Iterable[Case]) -> list[tuple[Case, Case]]:
    """Returns each case with magi and each stock case that trains the same."""
    by_job: dict[tuple[str, ...], list[Case]] = {}
    for case in cases:
        by_job.setdefault(_job(case.name), []).append(case)
    return [
        (stock, magi)
        for job, same in by_job.items()
        if CHECKPOINT not in job
        for magi in same
        if "magi" in _words(magi.name)
        for stock in same
        if "magi" not in _words(stock.name) and stock.gpus == magi.gpus
    ]


def _words(name: str) -> list[str]:
    return re.split(r"[ _]", name)


def _job(name: str) -> tuple[str, ...]:
    return tuple(word for word in _words(name) if word not in NOT_THE_JOB)


def unexplained(stock: Case, magi: Case) -> dict[str, tuple[Any, Any]]:
    """Returns what differs after Megatron's `validate_args` without a reason: (stock, magi).

    Arguments that the flag changes and that a stock job could set as well are without a reason.
    """
    allowed = {change.name for change in ARGUMENTS if change.stock_flag is None} | {*OF_ATTENTION}
    ours, theirs = (_validated(case) for case in (magi, stock))
    if ours["transformer_impl"] == "local":
        allowed |= {*NO_NORM}
    if stock.environment != magi.environment:
        return {"environment": (stock.environment, magi.environment)}
    return {
        name: (theirs.get(name), ours.get(name))
        for name in sorted(ours.keys() | theirs.keys())
        if name not in allowed and theirs.get(name) != ours.get(name)
    }


def _validated(case: Case) -> dict[str, Any]:
    line = words({**case.all_flags, "data-path": "corpus"})
    return _validated_line(tuple(line), case.gpus, tuple(case.environment.items()))


@cache  # a case has several counterparts
def _validated_line(
    line: tuple[str, ...], gpus: int, environment: tuple[tuple[str, str], ...]
) -> dict[str, Any]:
    options, rest = take_flags(line)
    args = _parser().parse_args(rest)
    with _environment(dict(environment)):
        return dict(vars(validated(args, gpus, with_magi=options is not None)))


@cache
def _parser() -> ArgumentParser:
    return megatron_parser()


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets the variables of a case, as pretrain.py does."""
    with mock.patch.dict(os.environ, {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **variables}):
        yield
