"""The key of a call: all that its checks and the choice of its launch read, but not where its
tensors lie. The layers and steps of a model are alike, so a call is checked in full when its key
is new, and later calls of the key find what was made then.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from megatron_magi.core.tensor_checks import tensor

MOST_CALLS = 192
"""The most calls that are kept in one table, so that tensors whose strides differ in every call do
not fill the memory."""


class PreparedCalls(dict[Hashable, Any]):
    """Prepared calls by their key."""

    def keep(self, key: Hashable, value: object) -> None:
        if len(self) >= MOST_CALLS:
            self.clear()
        self[key] = value


def call_key(q: Tensor, k: Tensor, v: Tensor) -> Hashable:
    """The key of queries, keys and values: their shapes, strides, dtypes and devices.

    Raises:
        TypeError: a nested tensor.
    """
    try:
        # Written out: as a loop it takes twice as long.
        return (
            q.shape, q.stride(), q.dtype, q.device,
            k.shape, k.stride(), k.dtype, k.device,
            v.shape, v.stride(), v.dtype, v.device,
        )  # fmt: skip
    except RuntimeError:  # one without a shape
        for name, x in zip("qkv", (q, k, v), strict=True):
            tensor(x, name)
        raise


def key_of(x: Tensor | None) -> Hashable:
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device)


def key_of_pair(pair: tuple[Tensor, Tensor] | None) -> Hashable:
    return None if pair is None else (key_of(pair[0]), key_of(pair[1]))
