"""Opens what ranks share, once Megatron has built the whole model, and prints the start-up line."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megatron_magi.adapter import MEGATRON_VERSION
from megatron_magi.adapter.pipeline_agreement import open_pipeline_agreement
from megatron_magi.adapter.plugin import startup_line
from megatron_magi.core.comm.reduce_group import share_communicator
from megatron_magi.launcher.samples import require_documents
from megatron_magi.launcher.session import LauncherState
from megatron_magi.launcher.tp_broadcast import TensorRanks


def begin(launch: LauncherState, iterators: Any) -> None:
    """Prepare the first schedule of a run; later ones find everything done.

    Raises:
        ValueError: documents are promised and do not come, on every rank.
    """
    if launch.startup_line is None:
        open_groups(launch)
        require_documents(launch, iterators)


def open_groups(launch: LauncherState) -> None:
    """Open the comparison of plans and choose the transport; every rank calls it once per run.

    It runs before the first schedule, not while the model is built: Megatron's build is collective
    in an order of its own, and a rank that waited here would keep others waiting there.

    Cost: gloo groups of the model- and tensor-parallel ranks, and one comparison of a plan.
    """
    args, magi = launch.args, launch.options.config
    open_pipeline_agreement(magi.agreement_timeout_s)
    tensor_group = launch.tensor_parallel_group()
    if tensor_group is not None and launch.has_documents():
        launch.microbatch.ranks = TensorRanks(tensor_group, magi.agreement_timeout_s)
    if launch.cp_group() is not None and getattr(args, "inprocess_restart", False):
        share_communicator(launch.cp_group())  # Megatron aborts its own communicators only
    length = args.seq_length * (args.micro_batch_size if launch.joins_samples() else 1)
    launch.startup_line = startup_line(launch.model_config, magi, length)


def say_startup(launch: LauncherState) -> None:
    """Print the start-up line on rank 0 with the first microbatch, whose documents it reports."""
    if launch.has_said_startup:
        return
    launch.has_said_startup = True
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    name = launch.options.mask_name
    documents = f"masked by {name}" if name else launch.documents
    print(
        f"{launch.startup_line}, megatron-core {MEGATRON_VERSION}, documents {documents}, "
        f"{len(launch.installed)} hooks",
        flush=True,
    )
