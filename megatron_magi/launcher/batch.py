"""Dispatches a batch by the plan, in place of Megatron's slicing for context parallelism."""

from __future__ import annotations

import copy
import inspect
from types import MappingProxyType, SimpleNamespace
from typing import Any

from torch import Tensor

from megatron_magi.adapter.carried_plan import carried_plan
from megatron_magi.adapter.rank_batch import Batch, dispatch_batch
from megatron_magi.core.runtime.token_dispatch import dispatch
from megatron_magi.launcher.documents import (
    bounds_of_cu_seqlens,
    bounds_of_eod,
    check_one_stream,
    missing_documents,
    requested_mask,
    sequence_bounds,
)
from megatron_magi.launcher.session import LauncherState, hook

ROWS = ("tokens", "labels", "loss_mask", "position_ids")
"""Entries of a Megatron batch that hold one value per token."""


def dispatch_dict(launch: LauncherState, batch: dict[str, Any]) -> dict[str, Any]:
    """Megatron's batch with this rank's rows in place of all of them, as a new dict.

    The given dict is not changed, because Megatron may use it again. Samples of a microbatch are
    joined to one stream. The dense attention mask is dropped, since the plan has the mask. Outside
    a schedule, where Megatron draws batches to skip them, nothing is planned.

    Args:
        batch: the full rows [micro batch, length]; entries may be None on a stage that reads none.

    Raises:
        ValueError: rows of different shapes, or nothing to plan from.
    """
    if launch.sequences is None:
        return batch
    batch = dict(batch)
    rows = {name: batch[name] for name in ROWS if batch.get(name) is not None}
    if not rows:
        raise ValueError(
            f"a batch to dispatch must hold some of {', '.join(ROWS)}, got {', '.join(batch)}; "
            f"call get_batch_on_this_cp_rank on stages that read rows"
        )
    bounds = _bounds(launch, batch, next(iter(rows.values())))
    _note_documents(launch, batch, len(bounds) - 1)
    # Read alone: what a function put in place of rows would not be dispatched.
    mask = requested_mask(launch.mask_function(), bounds, MappingProxyType(batch))
    packed = launch.plan(bounds, mask)
    full = Batch(**{name: x.reshape(1, -1) for name, x in rows.items()})
    batch_id = launch.microbatch.batch_id
    local = dispatch_batch(full, packed, launch.cp_group(), batch_id=batch_id).batch
    assert local is not None, "a batch with rows gives local rows"
    batch.update({name: getattr(local, name) for name in rows})
    if "attention_mask" in batch:
        batch["attention_mask"] = None
    return batch


def _bounds(launch: LauncherState, batch: dict[str, Any], rows: Tensor) -> list[int]:
    """From the sample on the host; from the rows on the device if an iterator of another class than
    Megatron's brought them."""
    cu_seqlens = batch.get("cu_seqlens")
    if cu_seqlens is not None:
        check_one_stream(cu_seqlens)
    bounds = launch.microbatch.bounds() if launch.has_documents() else None
    if bounds is not None:
        return bounds
    if cu_seqlens is not None:
        return bounds_of_cu_seqlens(cu_seqlens, batch.get("cu_seqlens_padded"), rows.numel())
    if launch.expects_cu_seqlens():
        raise missing_documents()
    eod = launch.eod()
    if eod is None:
        return sequence_bounds((rows.shape[0], rows.shape[1]))
    if batch.get("tokens") is None:
        raise ValueError(
            "documents by --reset-attention-mask require tokens, got a pipeline stage without them "
            "and samples that no RerunDataIterator of Megatron brought; draw samples through it"
        )
    return bounds_of_eod(batch["tokens"], eod)


def _note_documents(launch: LauncherState, batch: dict[str, Any], count: int) -> None:
    """Keep for the start-up line where this microbatch's boundaries came from."""
    if launch.has_said_startup:
        return
    source = "cu_seqlens" if batch.get("cu_seqlens") is not None else "EOD"
    if source == "cu_seqlens" or launch.has_documents():
        launch.documents = f"by {source} ({count} in the first microbatch)"


@hook
def replace_cp_batch(
    launch: LauncherState, original: Any, batch: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """For `get_batch_on_this_cp_rank` of every version."""
    if launch.captures_attention():
        return original(batch, *args, **kwargs)
    return dispatch_dict(launch, batch)


@hook
def wrap_sft_dataset(
    launch: LauncherState, original: Any, self: Any, *args: Any, **kwargs: Any
) -> Any:
    """For `SFTDataset.__init__`: conversations are not padded to twice the number of ranks."""
    signature = inspect.signature(original)
    given = signature.bind(self, *args, **kwargs)
    unpadded = copy.copy(given.arguments["config"])
    unpadded.context_parallel_size = 1
    given.arguments["config"] = unpadded
    original(*given.args, **given.kwargs)


@hook
def replace_scheduled_batch(
    launch: LauncherState,
    original: Any,
    data_iterator: Any,
    *args: Any,
    pg_collection: Any = None,
    **kwargs: Any,
) -> Any:
    """For `get_batch_on_this_rank_for_sequence_packing` of 0.20.

    Megatron assembles the whole stream as for one context-parallel rank, and we dispatch it.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    if launch.sequences is None:
        return original(data_iterator, *args, pg_collection=pg_collection, **kwargs)
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "pp"])
    one_rank = SimpleNamespace(size=lambda: 1, rank=lambda: 0)  # what Megatron asks a group for
    alone = ProcessGroupCollection(tp=groups.tp, pp=groups.pp, cp=one_rank)
    tokens, labels, loss_mask, _, position_ids, params, padding = original(
        data_iterator, *args, pg_collection=alone, **kwargs
    )
    batch = {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": loss_mask,
        "position_ids": position_ids,
        "cu_seqlens": params.cu_seqlens_q,
    }
    if any(batch[name] is not None for name in ROWS):
        batch = dispatch_dict(launch, batch)
    padding = _dispatch_padding(launch, batch, padding)
    rows = [batch[name] for name in ROWS[:3]]
    return (*rows, None, batch["position_ids"], params, padding)


def _dispatch_padding(launch: LauncherState, batch: dict[str, Any], padding: Tensor) -> Tensor:
    """bool [1, num_local_tokens]: True where a router must not count the row."""
    rows = next((batch[name] for name in ("tokens", "labels") if batch[name] is not None), None)
    packed = carried_plan(rows)
    if packed is None:  # a middle pipeline stage: its forward makes the same plan
        bounds = bounds_of_cu_seqlens(batch["cu_seqlens"], None, padding.numel())
        packed = launch.plan(bounds, requested_mask(launch.mask_function(), bounds, None))
    whole = padding.reshape(-1).long()
    local = dispatch(whole, packed.token_plan, launch.cp_group(), pad_value=1)
    return local.bool().unsqueeze(0)
