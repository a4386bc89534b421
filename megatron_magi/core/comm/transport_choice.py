"""Chooses the transport of attention's rows, together on all ranks of a group."""

from __future__ import annotations

import functools
import logging
import threading
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magi.config import KernelBackend
from megatron_magi.core.comm.copy_engine import CopyEngine
from megatron_magi.core.comm.reduce_group import reduce_group
from megatron_magi.core.comm.transport import AllToAll, Transport
from megatron_magi.core.cuda.library import loaded_cuda_library
from megatron_magi.core.plan import AttnPlan, HeadShape
from megatron_magi.core.plan.peer_rows import MAX_PEERS, reads_peers

logger = logging.getLogger("megatron_magi")

_engines: WeakKeyDictionary[dist.ProcessGroup, CopyEngine | str] = WeakKeyDictionary()
"""A group's copy engine, or why it has none."""
_Inputs = tuple[torch.dtype, KernelBackend, HeadShape]
"""The inputs that decide a call's kernel; they are equal on every rank."""
_without_library: WeakKeyDictionary[dist.ProcessGroup, set[_Inputs]] = WeakKeyDictionary()
"""The calls of a group that have no copy engine because another kernel than ours computes them.
Other calls of the group may have one."""
_table_lock = threading.Lock()
CASTS_BEHIND_REDUCES = 4
"""With this many casts or more, a backward begins a cast after a reduce whose rows it would have to
wait for, so reduces get a communicator of their own."""
GRAD_BYTES = 4
"""The most bytes of an element of a gradient that returns: fp32."""


def transport_for(plan: AttnPlan, group: dist.ProcessGroup | None, like: Tensor) -> Transport:
    """The transport of a plan's rows.

    Args:
        like: a tensor of the device and dtype of the rows.

    Raises:
        RuntimeError: on every rank, if the config requires "symm_mem" and it cannot be had, or too
            little memory is left for it. The message says why.

    Cost: the first call of a group waits for the other ranks and for the device, and so does the
    first call with a plan that needs more memory than any plan before it.
    """
    wanted = plan.config.transport
    if wanted == "symm_mem" and plan.cp_size == 1:
        _say_that_nothing_travels()
    if group is None or wanted == "all_to_all" or len(plan.transfers) == 0:
        return AllToAll(group)
    engine = _engines.get(group)
    if engine is None:
        engine = _choose(plan, group, like)
    if isinstance(engine, str):
        return _without_engine(group, wanted, engine)
    reads = reads_peers(plan.config, plan.cp_size, plan.ranks_per_node)
    if not reads or like.dtype not in _DTYPES:
        why = "a plan for several nodes" if like.dtype in _DTYPES else f"rows in {like.dtype}"
        return _without_engine(group, wanted, why)
    try:
        engine.reserve(group, _slot_bytes(plan, like))
    except RuntimeError as error:  # on every rank
        _engines[group] = str(error)
        logger.warning("transport of attention: all_to_all from now on (%s)", error)
        return _without_engine(group, wanted, str(error))
    return engine


@functools.cache
def _say_that_nothing_travels() -> None:
    """Once a process, so that nobody takes a run of one rank for a trial of this transport."""
    logger.warning("transport symm_mem is not used: one rank exchanges nothing")


def transport_of_reduces(
    casts: Transport, plan: AttnPlan, like: Tensor, num_casts: int
) -> Transport:
    """The transport of a backward's gradients: a communicator of their own from four casts on.

    Three casts begin before the first reduce. In the same communicator, a fourth would wait until
    that reduce has moved its rows. Copy engines never need a second communicator.

    Args:
        casts: what moves keys and values.
        like: a tensor of the device of the rows.
        num_casts: how often this backward fetches keys and values; equal on every rank.

    Raises:
        RuntimeError: a rank did not come; see ``reduce_group``.
    """
    if not isinstance(casts, AllToAll) or casts.group is None or num_casts < CASTS_BEHIND_REDUCES:
        return casts
    communicator = reduce_group(casts.group, like.device, plan.config.agreement_timeout_s)
    return AllToAll(casts.group, communicator)


def _without_engine(group: dist.ProcessGroup, wanted: str, why: str) -> AllToAll:
    """The all-to-all, unless the config requires what cannot be had."""
    if wanted == "symm_mem":
        raise RuntimeError(
            f"transport {wanted!r} needs GPUs of one host that read each other's memory, got "
            f"{why}; set MagiConfig.transport to 'auto' or 'all_to_all'"
        )
    return AllToAll(group)


def engines() -> list[CopyEngine]:
    """Every copy engine of this process, for the watcher."""
    with _table_lock:
        return [engine for engine in _engines.values() if isinstance(engine, CopyEngine)]


def _slot_bytes(plan: AttnPlan, like: Tensor) -> int:
    """Bytes of the rows that a rank holds ready at a time; equal on all ranks."""
    heads = plan.head_shape
    columns = heads.num_heads_kv * (heads.head_dim + heads.value_dim)
    sent, returned = plan.slot_rows
    return columns * max(sent * like.element_size(), returned * GRAD_BYTES)


def _choose(plan: AttnPlan, group: dist.ProcessGroup, like: Tensor) -> CopyEngine | str:
    """Open the group's copy engine, or find out why there can be none; all ranks do it together."""
    if like.device.type != "cuda":
        return "tensors on the CPU"
    if not reads_peers(plan.config, plan.cp_size, plan.ranks_per_node):
        return f"ranks on several nodes, or more than {MAX_PEERS} ranks"
    inputs = like.dtype, plan.config.kernel_backend, plan.head_shape
    if inputs in _without_library.get(group, ()):
        return _OTHER_KERNEL
    with torch.cuda.device(like.device):
        engine = _why_not(group, like) or _opened(group, like.device, _slot_bytes(plan, like))
    with _table_lock:
        if engine == _OTHER_KERNEL:
            _without_library.setdefault(group, set()).add(inputs)
        else:
            _engines[group] = engine
    if dist.get_rank(group) == 0:
        why = f" ({engine})" if isinstance(engine, str) else ""
        used = AllToAll(group) if isinstance(engine, str) else engine
        logger.info("transport of attention: %s%s", used.name, why)
    return engine


def _why_not(group: dist.ProcessGroup, like: Tensor) -> str:
    """Why the ranks cannot read each other's memory, as all of them see it; empty: they may."""
    library = loaded_cuda_library(like.device)
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = boot.read_text().strip() if boot.exists() else ""
    gpu = str(torch.cuda.get_device_properties(like.device).uuid)
    mine = host, gpu, library is not None and like.dtype in _DTYPES
    everyone: list[tuple[str, str, bool]] = [("", "", False)] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    if not all(fits for _, _, fits in everyone):
        return _OTHER_KERNEL
    if len({host for host, _, _ in everyone}) > 1 or not host:
        return "ranks on several hosts"
    if len({gpu for _, gpu, _ in everyone}) < len(everyone):
        return "several ranks on one GPU"
    return ""


def _opened(group: dist.ProcessGroup, device: torch.device, slot_bytes: int) -> CopyEngine | str:
    try:
        return CopyEngine(group, device, slot_bytes)
    except RuntimeError as error:
        return str(error)


_DTYPES = (torch.bfloat16, torch.float16)
_OTHER_KERNEL = "another kernel than 'cuda', or a dtype that it does not take"
