"""Replicas compare how they deal, because one that deals differently trains a sample twice."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from megatron_magi.core.runtime.agreement.comparison import AgreementError
from megatron_magi.launcher.samples import peek_samples
from megatron_magi.launcher.session import LauncherState

NOTHING = -(1 << 62)
"""Below every digest: a rank without data."""

Fields = dict[str, Any]


def agree_on_dealing(launch: LauncherState, iterators: Any, is_training: bool) -> None:
    """Compare the first dealt step, before the first training schedule and the first other one.

    All ranks call it, also those without data. Rank 0 prints what was dealt.

    Args:
        iterators: the schedule's data_iterator: one, a list for virtual stages, or None.

    Raises:
        AgreementError: on every rank, if one of them deals differently.

    Cost: an all-reduce of two numbers over the job, once for training and once for validation.
    """
    balance = launch.balance
    if not launch.options.balance_step or is_training in balance.compared:
        return
    peek_samples(launch, iterators)
    balance.compared.add(is_training)
    found: Fields = {}
    for split, step in sorted(balance.first_steps.items()):
        if (split == "train") == is_training:
            found |= {f"{name} ({split})": x for name, x in asdict(step).items() if name != "line"}
    _require_equal(found)
    if is_training and "train" in balance.first_steps and _is_first_rank():
        print(f"megatron_magi balance: {balance.first_steps['train'].line}", flush=True)


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _require_equal(found: Fields) -> None:
    if not dist.is_initialized():
        return
    digest = _digest(found) if found else None
    pair = [NOTHING, NOTHING] if digest is None else [digest, -digest]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    extremes = torch.tensor(pair, dtype=torch.int64, device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    highest, lowest = extremes.tolist()
    if highest + lowest == 0 or highest == NOTHING:
        return
    everyone: list[Fields] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    raise AgreementError(difference(everyone))


def _digest(found: Fields) -> int:
    return int.from_bytes(hashlib.blake2b(repr(found).encode(), digest_size=7).digest(), "big")


def difference(everyone: list[Fields]) -> str:
    """Names the first rank that differs from the first one with data, and in what."""
    known = {rank: fields for rank, fields in enumerate(everyone) if fields}
    first, wanted = next(iter(known.items()))
    rank, got = next((each for each in known.items() if each[1] != wanted), (first, wanted))
    names = [name for name in wanted | got if wanted.get(name) != got.get(name)]
    name = names[0] if names else "fields"
    return (
        f"all ranks must deal the samples of a step alike, got {name} {got.get(name)} on rank "
        f"{rank} and {wanted.get(name)} on rank {first}, which would train a sample twice; give "
        f"all ranks the same data files, --data-cache-path and versions, or leave "
        f"--magi-balance-step out"
    )
