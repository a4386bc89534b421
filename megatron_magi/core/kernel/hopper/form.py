"""The form of a call: all that its checks and the choice of its launch read, but not where its
tensors lie. A call is checked in full once for each form, because the layers of a model are alike.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from megatron_magi.core.kernel.backend import AttnCall, Pair
from megatron_magi.core.kernel.slice_table import SliceTable

MOST_FORMS = 64
"""That a table keeps; tensors whose strides differ in every call do not fill the memory."""


def form_of_call(call: AttnCall) -> Hashable:
    """Of all that a call has besides its table and the largest logits."""
    q, k, v, _, scale, _, softcap, sink_lse, received = call
    # Written out: with a loop this takes twice as long.
    return (
        q.shape, q.stride(), q.dtype, q.device,
        k.shape, k.stride(), k.dtype, k.device,
        v.shape, v.stride(), v.dtype, v.device,
        scale, softcap,
        None if sink_lse is None else form_of(sink_lse),
        None if received is None else (form_of_pair(received[:2]), received.travel),
    )  # fmt: skip


def form_of(x: Tensor | None) -> Hashable:
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device)


def form_of_pair(pair: Pair | None) -> Hashable:
    return None if pair is None else (form_of(pair[0]), form_of(pair[1]))


def known(table: SliceTable, direction: str) -> dict[Hashable, Any]:
    """What is kept for the forms of a table's calls."""
    found: dict[Hashable, Any] | None = table.cache.get(direction)
    return table.cache.setdefault(direction, {}) if found is None else found


def keep(table: SliceTable, direction: str, form: Hashable, value: object) -> None:
    """Keep something for a form."""
    kept = known(table, direction)
    if len(kept) >= MOST_FORMS:
        kept.clear()
    kept[form] = value
