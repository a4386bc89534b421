"""Streams of signatures of a group's ranks, compared as far as all ranks have called.

A gather carries one block from every rank: the number of signatures in it, and up to BATCH of them.
All ranks receive the same blocks in the same order, so after the same number of gathers they know
the same streams and find the same difference. Each rank is free in how it cuts its stream into
blocks.

A rank starts the next gather, sooner or later, in either of two cases:

1. It has signatures that were not sent.
2. It has received every gather that it started, and knows of a rank that is behind it.

If all ranks make the same calls, every gather that one rank starts is then started by all. Suppose
that a rank starts no further gather, although it has received all gathers before this one. By
rule 1 it has sent all its calls, and by rule 2 no rank is behind it. As all ranks make the same
calls, every rank has then sent every call, so no rank had a reason to start this gather. Each
gather also carries at least one signature of every rank that was furthest behind, because such a
rank starts none without. So a rank that waits until all have caught up with it waits for a bounded
number of gathers.
"""

from __future__ import annotations

from array import array

import numpy as np

from megatron_magi.core.runtime.agreement.signature import SIGNATURE_LEN, Signature, Signatures

BATCH = 16
"""Signatures that are sent together."""

BLOCK_SHAPE = (1 + BATCH, SIGNATURE_LEN)
"""int64; the first number says how many of the rows after the first row are signatures."""


class Streams:
    """The calls of all ranks of one group, as far as this rank knows."""

    def __init__(self, num_ranks: int, rank: int) -> None:
        self.rank = rank
        self.num_calls = 0
        """The number of this rank's calls, sent or not."""
        self.unsent = array("q")
        """This rank's signatures that were not sent yet, one after the other."""
        self.lengths = [0] * num_ranks
        """How many signatures each rank's gathers have brought."""
        self._left = [np.empty((0, SIGNATURE_LEN), np.int64)] * num_ranks
        """Signatures of each rank that were received and not compared yet."""

    def append(self, signature: Signature) -> None:
        """Append the next call of this rank."""
        self.unsent.extend(signature)
        self.num_calls += 1

    def has_batch(self) -> bool:
        """True if the unsent signatures fill a block."""
        return len(self.unsent) >= BATCH * SIGNATURE_LEN

    def leads(self) -> bool:
        """True if some rank is known to be behind this one."""
        return self.lengths[self.rank] > min(self.lengths)

    def fill(self, block: Signatures) -> None:
        """Move what was not sent into a block of BLOCK_SHAPE, up to BATCH signatures."""
        most = BATCH * SIGNATURE_LEN
        sent, self.unsent = self.unsent[:most], self.unsent[most:]
        num_sent = len(sent) // SIGNATURE_LEN
        block[0, 0] = num_sent
        block[1 : 1 + num_sent] = np.array(sent, np.int64).reshape(-1, SIGNATURE_LEN)

    def take_in(self, blocks: Signatures) -> Signatures | None:
        """Append a gather's blocks, [ranks, *BLOCK_SHAPE], and compare the calls that all have now.

        Returns:
            The signatures of the first call in which ranks differ, [ranks, SIGNATURE_LEN]; a copy.
        """
        counts = blocks[:, 0, 0].tolist()
        calls = self._common(blocks, counts)
        self.lengths = [a + b for a, b in zip(self.lengths, counts, strict=True)]
        differs = (calls != calls[0]).any(axis=(0, 2))
        return calls[:, int(differs.argmax())].copy() if differs.any() else None

    def _common(self, blocks: Signatures, counts: list[int]) -> Signatures:
        """[ranks, calls, SIGNATURE_LEN]: the calls that every rank has now sent; they are removed
        from the streams."""
        if min(self.lengths) == max(self.lengths) and min(counts) == max(counts):
            return blocks[:, 1 : 1 + counts[0]]  # the usual case, unless a watcher sent early
        new = [block[1 : 1 + n] for block, n in zip(blocks, counts, strict=True)]
        left = [np.concatenate(pair) for pair in zip(self._left, new, strict=True)]
        num_common = min(len(x) for x in left)
        self._left = [x[num_common:] for x in left]
        return np.stack([x[:num_common] for x in left])
