"""Sequences that share their beginnings, each shared part laid out once.

Answers to one prompt, or the branches of a search, form a tree: every node is a run of tokens, and
a sequence is the path from a root to a leaf. Attention over `mask()` at `positions()` gives every
token what it gets if its path is packed alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron_magi.checks import integer, integers
from megatron_magi.core.mask import builders
from megatron_magi.core.mask.mask import AttnMask

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PrefixTree:
    """Nodes in the order of the stream, parents first.

    Raises:
        TypeError: something else than integers.
        ValueError: unpaired arguments, an empty node, or a parent that is not an earlier node.
    """

    node_lengths: tuple[int, ...]
    """Tokens of each node, 1 or more."""
    parents: tuple[int, ...]
    """Index of each node's parent; -1 for a root."""

    def __post_init__(self) -> None:
        for name in ("node_lengths", "parents"):
            object.__setattr__(self, name, tuple(integers(getattr(self, name), name)))
        builders.prefix_tree(self.node_lengths, self.parents)  # its checks
        if min(self.node_lengths, default=0) < 1:
            raise ValueError(
                f"a tree needs nodes of 1 token or more, got node lengths "
                f"{self.node_lengths[:8]}; leave empty nodes out"
            )

    @classmethod
    def of_answers(cls, prompt_length: int, answer_lengths: Sequence[int]) -> PrefixTree:
        """One prompt and its answers, in this order.

        Raises:
            TypeError, ValueError: as the class.
        """
        prompt = integer(prompt_length, "prompt_length", 1)
        answers = integers(answer_lengths, "answer_lengths")
        return cls((prompt, *answers), (-1, *[0] * len(answers)))

    @cached_property
    def starts(self) -> Int64Array:
        """int64 [nodes + 1]: first row of each node, and the number of rows."""
        return np.concatenate([[0], np.cumsum(self.node_lengths)]).astype(np.int64)

    @property
    def total_seqlen(self) -> int:
        """Rows of all nodes."""
        return int(self.starts[-1])

    def mask(self) -> AttnMask:
        """A row sees its ancestors' rows and, causally, those of its own node."""
        return builders.prefix_tree(self.node_lengths, self.parents)

    def positions(self) -> Int64Array:
        """int64 [rows]: place of each row in its sequence; children continue after their parent."""
        depths = np.zeros(len(self.parents), np.int64)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                depths[node] = depths[parent] + self.node_lengths[parent]
        return np.arange(self.total_seqlen) + np.repeat(
            depths - self.starts[:-1], self.node_lengths
        )

    def predecessors(self) -> Int64Array:
        """int64 [rows]: the row before each one in its sequence, whose logits predict it; -1 for
        the first row of a root.

        Every row is predicted by one row, but the end of a node predicts the first rows of all its
        children, so that labels of the usual form, one for each row, cannot hold a tree.
        """
        before = np.arange(-1, self.total_seqlen - 1)
        for node, parent in enumerate(self.parents):
            before[self.starts[node]] = self.starts[parent + 1] - 1 if parent >= 0 else -1
        return before

    def branches(self) -> list[list[int]]:
        """The nodes of each sequence from its root to its leaf, in the order of the leaves."""
        parents = {*self.parents}
        leaves = [node for node in range(len(self.parents)) if node not in parents]
        return [self._path(leaf) for leaf in leaves]

    def rows_of(self, nodes: Sequence[int]) -> Int64Array:
        """int64 [tokens]: the rows of these nodes, one after another.

        Raises:
            TypeError, ValueError: something else than indices of nodes.
        """
        last = len(self.parents) - 1
        chosen = [integer(node, "a node", 0, last) for node in integers(nodes, "nodes")]
        rows = [np.arange(*self.starts[node : node + 2]) for node in chosen]
        return np.concatenate([np.zeros(0, np.int64), *rows])

    def _path(self, leaf: int) -> list[int]:
        path = [leaf]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        return path[::-1]
