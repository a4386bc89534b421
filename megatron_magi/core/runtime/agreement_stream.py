"""What each rank of a group has called: streams of signatures, compared as far as all have come.

A gather brings one block of every rank: how many signatures it holds, and up to BATCH of them. All
ranks receive the same blocks in the same order, so after the same number of gathers they know the
same streams and find the same difference. How a rank cuts its stream into blocks is its own affair.

When does a rank start the next gather? Two rules, which every rank follows, however late:

1. It has signatures that were not sent.
2. It has received every gather that it started, and knows of a rank that is behind it.

With equal calls every gather that one rank starts is then started by all. For suppose that a rank
starts no more, although it has received all gathers before this one. By rule 1 it has sent all that
it called, and by rule 2 no rank is behind it. So, as all ranks make the same calls, every call has
been sent by every rank: nobody had a reason to start this gather. Each gather also brings at least
one signature of every rank that was furthest behind, because such a rank starts none without, so a
rank that waits until all have caught up with it waits for a bounded number of gathers.
"""

from __future__ import annotations

from array import array

import numpy as np

from megatron_magi.core.runtime.agreement_signature import SIGNATURE_LEN, Signature, Signatures

BATCH = 16
"""Signatures that are sent together."""

BLOCK_SHAPE = (1 + BATCH, SIGNATURE_LEN)
"""int64; the first number says how many of the rows behind the first one are signatures."""


class Streams:
    """The calls of all ranks of one group, as far as this rank knows."""

    def __init__(self, num_ranks: int, rank: int) -> None:
        self.rank = rank
        self.num_calls = 0
        """Of this rank, sent or not."""
        self.unsent = array("q")
        """Signatures, one behind the other."""
        self.lengths = [0] * num_ranks
        """Signatures that were received of each rank."""
        self._left = [np.empty((0, SIGNATURE_LEN), np.int64)] * num_ranks
        """Received, and not compared yet."""

    def append(self, signature: Signature) -> None:
        """The next call of this rank."""
        self.unsent.extend(signature)
        self.num_calls += 1

    def has_batch(self) -> bool:
        """As much was not sent as a block holds."""
        return len(self.unsent) >= BATCH * SIGNATURE_LEN

    def leads(self) -> bool:
        """Some rank is known to be behind this one."""
        return self.lengths[self.rank] > min(self.lengths)

    def fill(self, block: Signatures) -> None:
        """Move what was not sent into a block of BLOCK_SHAPE, up to BATCH signatures."""
        most = BATCH * SIGNATURE_LEN
        sent, self.unsent = self.unsent[:most], self.unsent[most:]
        num_sent = len(sent) // SIGNATURE_LEN
        block[0, 0] = num_sent
        block[1 : 1 + num_sent] = np.array(sent, np.int64).reshape(-1, SIGNATURE_LEN)

    def take_in(self, blocks: Signatures) -> Signatures | None:
        """Append what a gather has brought, [ranks, *BLOCK_SHAPE], and compare what all have now.

        Returns:
            The signatures of the first call in which ranks differ, [ranks, SIGNATURE_LEN]; a copy.
        """
        counts = blocks[:, 0, 0].tolist()
        calls = self._common(blocks, counts)
        self.lengths = [a + b for a, b in zip(self.lengths, counts, strict=True)]
        differs = (calls != calls[0]).any(axis=(0, 2))
        return calls[:, int(differs.argmax())].copy() if differs.any() else None

    def _common(self, blocks: Signatures, counts: list[int]) -> Signatures:
        """[ranks, calls, SIGNATURE_LEN]: what has now come of every rank; it leaves the streams."""
        if min(self.lengths) == max(self.lengths) and min(counts) == max(counts):
            return blocks[:, 1 : 1 + counts[0]]  # as always, unless a watcher was early
        new = [block[1 : 1 + n] for block, n in zip(blocks, counts, strict=True)]
        left = [np.concatenate(pair) for pair in zip(self._left, new, strict=True)]
        num_common = min(len(x) for x in left)
        self._left = [x[num_common:] for x in left]
        return np.stack([x[:num_common] for x in left])
