"""A tree's rows are those of its sequences, packed alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_magi import PrefixTree


@st.composite
def trees(draw: st.DrawFn) -> PrefixTree:
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=8))
    parents = [draw(st.integers(-1, node - 1)) for node in range(len(lengths))]
    return PrefixTree(tuple(lengths), tuple(parents))


@given(tree=trees())
def test_every_branch_is_a_causal_sequence(tree: PrefixTree) -> None:
    visible = tree.mask().to_dense()
    positions, before = tree.positions(), tree.predecessors()
    seen = np.zeros(tree.total_seqlen, dtype=int)
    for nodes in tree.branches():
        rows = tree.rows_of(nodes)
        assert (visible[np.ix_(rows, rows)] == np.tri(len(rows), dtype=bool)).all()
        assert positions[rows].tolist() == [*range(len(rows))]
        assert before[rows].tolist() == [-1, *rows[:-1]]
        # A row sees nothing beside its own sequence.
        assert (visible[rows].sum(axis=1) == np.arange(1, len(rows) + 1)).all()
        seen[rows] += 1
    assert seen.min() >= 1, "every row is in a sequence"


def test_answers_to_one_prompt() -> None:
    tree = PrefixTree.of_answers(3, [2, 1])
    assert tree.branches() == [[0, 1], [0, 2]] and tree.total_seqlen == 6
    assert tree.positions().tolist() == [0, 1, 2, 3, 4, 3]
    assert tree.predecessors().tolist() == [-1, 0, 1, 2, 3, 2]


@pytest.mark.parametrize(
    ("lengths", "parents", "text"),
    [
        ((2, 0), (-1, 0), "nodes of 1 token or more, got node lengths .2, 0."),
        ((), (), "nodes of 1 token or more"),
        ((2, 2), (-1,), "must pair up, got 2 and 1"),
        ((2, 2), (-1, 1), "must be an earlier node or -1, got 1 for node 1"),
    ],
)
def test_what_is_no_tree_is_refused(lengths: tuple, parents: tuple, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        PrefixTree(lengths, parents)
