"""The documents of the microbatch that a forward step works on, known to the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_magi.adapter.rank_batch import batch_id_of
from megatron_magi.launcher.documents import missing_documents
from megatron_magi.launcher.tp_broadcast import TensorRanks

UNKNOWN = [-1]
"""Sent to the other tensor-parallel ranks for a sample that is not on the host."""


class Microbatch:
    """Boundaries of documents from the sample that this forward step has drawn.

    A forward step calls `begin`; drawing a sample calls `see` and then `identify`; the hook of the
    batch, or the model of a middle pipeline stage, then asks for `bounds`. The first rank of tensor
    parallelism draws samples and tells the others.
    """

    def __init__(
        self,
        read: Callable[[dict[str, Any]], list[int]],
        plan_ahead: Callable[[list[int]], None],
    ) -> None:
        """
        Args:
            read: the boundaries of a sample whose tokens are on the host; [] if it has none
                though the job's arguments promise them.
            plan_ahead: called with the boundaries of samples of later forward steps.
        """
        self._read, self._plan_ahead = read, plan_ahead
        self.ranks: TensorRanks | None = None
        """None: this rank draws its samples itself."""
        self._iterator: Any = None
        self._bounds: list[int] | None = None
        self._is_shared = False
        self.batch_id: int | None = None
        """Tells the sample from others; None if it was not seen on the host."""
        self._ahead: list[list[int]] = []
        self._of_samples: Any = WeakTensorKeyDictionary()

    def begin(self, iterator: Any) -> None:
        """A forward step begins, which may draw a sample of this iterator."""
        self._iterator, self._bounds, self._is_shared = iterator, None, False
        self.batch_id = None

    def see(self, sample: Any) -> None:
        """The forward step has drawn this sample, as it came from the data loader."""
        self._bounds = self._bounds_of(sample)
        rows = _host_rows(sample)
        if rows is not None:  # a loader may fill the same tensor again
            self._of_samples.pop(rows, None)

    def identify(self, sample: Any) -> None:
        """Note what tells this sample from others, if it is on the host."""
        rows = _host_rows(sample)
        self.batch_id = None if rows is None else batch_id_of(rows)

    def see_ahead(self, sample: Any) -> None:
        """A later forward step will draw this sample."""
        bounds = self._bounds_of(sample)
        if bounds is not None:
            self._of_samples[sample["tokens"]] = bounds
        if bounds:
            self._ahead.append(bounds)
            self._plan_ahead(bounds)

    def bounds(self, *, draws: bool = False) -> list[int] | None:
        """The boundaries, on every rank of the stage; None if they are not known to the host.

        Args:
            draws: the stage reads no rows, so that Megatron draws no sample there.

        Raises:
            ValueError: the sample has no documents though the job's arguments promise them; every
                tensor-parallel rank raises it.
        """
        if not self._is_shared:
            if draws and self._bounds is None and self._iterator is not None:
                next(self._iterator)
            self._share()
            self._is_shared = True
        if self._bounds == []:
            raise missing_documents()
        return self._bounds

    def _share(self) -> None:
        ahead, self._ahead = self._ahead, []
        if self.ranks is None:
            return
        own = UNKNOWN if self._bounds is None else self._bounds
        bounds, *ahead = self.ranks.share([own, *ahead])
        self._bounds = None if bounds == UNKNOWN else bounds
        if self.ranks.rank > 0:
            for each in ahead:
                self._plan_ahead(each)

    def _bounds_of(self, sample: Any) -> list[int] | None:
        rows = _host_rows(sample)
        if rows is None:
            return None
        known: list[int] | None = self._of_samples.get(rows)
        return self._read(sample) if known is None else known


def _host_rows(sample: Any) -> Tensor | None:
    """The tokens of a sample that is on the host."""
    rows = sample.get("tokens") if isinstance(sample, dict) else None
    return rows if isinstance(rows, Tensor) and rows.device.type == "cpu" else None
