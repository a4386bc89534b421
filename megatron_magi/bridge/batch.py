"""Bridge's batches: their documents in Megatron's words, their rows dispatched by the plan.

Bridge names boundaries as TransformerEngine does (cu_seqlens_q, cu_seqlens_q_padded). Older data
sets of its own have cu_seqlens with the padding, cu_seqlens_unpadded without it, and -1 behind the
last boundary.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_magi.launcher.batch import dispatch_dict
from megatron_magi.launcher.session import LauncherState, hook

BOUNDARIES = (("cu_seqlens_q", "cu_seqlens_q_padded"), ("cu_seqlens_unpadded", "cu_seqlens"))
"""Names of the boundaries without and with padding: today's, and those of older data sets."""


def with_documents(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with cu_seqlens and cu_seqlens_padded as Megatron's loaders have them."""
    for logical, physical in BOUNDARIES:
        found = batch.get(logical), batch.get(physical)
        if found == (None, None):
            continue
        documents, padded = (None if x is None else _without_sentinels(x) for x in found)
        if documents is None:
            documents, padded = padded, None
        return {**batch, "cu_seqlens": documents, "cu_seqlens_padded": padded}
    return batch


def _without_sentinels(cu_seqlens: Tensor) -> Tensor:
    if cu_seqlens.numel() < 2 or (cu_seqlens.dim() == 2 and cu_seqlens.shape[0] != 1):
        return cu_seqlens  # the launcher says what is wrong with several rows
    row = cu_seqlens.reshape(-1)
    return row[row >= 0]


@hook
def replace_rows(
    launch: LauncherState, original: Any, batch: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """For `get_batch_on_this_cp_rank` and `_partition_packed_batch_for_cp`, by which Bridge shares
    out plain rows and packed documents: this rank's rows in place of all, as a new dict."""
    if launch.captures_attention():
        return original(batch, *args, **kwargs)
    local = dispatch_dict(launch, with_documents(batch))
    return {name: local[name] for name in batch}
