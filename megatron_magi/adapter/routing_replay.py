"""Replays the routing of a rollout: the chosen experts travel with their rows.

Megatron replays a router's choice row by row (`moe_enable_routing_replay`). A rollout has the rows
in the order of the stream, a context-parallel rank in the order of the plan.

    RouterReplay.set_replay_data(dispatch_routing(chosen, packed, cp_group))
    ...
    chosen = gather_routing(RouterReplay.get_recorded_data(), packed, cp_group)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_magi.adapter.packed import MagiPackedSeqParams
from megatron_magi.checks import instance
from megatron_magi.core.runtime.token_dispatch import dispatch, undispatch
from megatron_magi.core.tensor_checks import tensor


def dispatch_routing(
    chosen: Sequence[Tensor],
    packed: MagiPackedSeqParams,
    cp_group: Any,
    *,
    sequence_parallel: bool = False,
) -> list[Tensor]:
    """The choices that this rank's routers replay.

    Args:
        chosen: [stream length, top k] for each layer with experts: expert indices in the order of
            the stream, equal on all ranks.
        packed: of the microbatch.
        cp_group: the context-parallel group; None means size 1.
        sequence_parallel: whether routers hold a tensor-parallel rank's part of the rows.

    Raises:
        TypeError: another kind of packed or of tensors.
        ValueError: another length than the stream's.

    Cost: no communication.
    """
    instance(packed, MagiPackedSeqParams, "packed", "make it with make_packed_seq_params")
    rows = [dispatch(_checked(x), packed.token_plan, cp_group) for x in chosen]
    if not sequence_parallel:
        return rows
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    return [x.chunk(size)[rank].contiguous() for x in rows]


def gather_routing(
    recorded: Sequence[Tensor],
    packed: MagiPackedSeqParams,
    cp_group: Any,
    *,
    sequence_parallel: bool = False,
) -> list[Tensor]:
    """The recorded choices of all ranks, [stream length, top k] for each layer.

    It mirrors `dispatch_routing` and takes and raises the same.

    Cost: an all-gather over the context-parallel group for each layer, and with sequence_parallel
    another one over the tensor-parallel group.
    """
    instance(packed, MagiPackedSeqParams, "packed", "make it with make_packed_seq_params")
    rows = [_checked(x) for x in recorded]
    if sequence_parallel:
        rows = [_gather_rows(x, parallel_state.get_tensor_model_parallel_group()) for x in rows]
    return [undispatch(x, packed.token_plan, cp_group) for x in rows]


def _checked(x: Tensor) -> Tensor:
    tensor(x, "expert indices")
    return x


def _gather_rows(x: Tensor, group: Any) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)
