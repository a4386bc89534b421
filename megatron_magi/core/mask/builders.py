"""The masks that models are trained with, each built from few slices.

Lengths and positions are in tokens. ``cu_seqlens`` are prefix sums of document lengths that begin
with 0; a ``total_seqlen`` beyond the last document leaves padding rows that see nothing. Windows
are (left, right) numbers of keys before and after the query, -1 for no limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from megatron_magi.checks import (
    INT32_MAX,
    as_array,
    flag,
    int_array,
    integer,
    integers,
    pair,
    shown,
)
from megatron_magi.core.mask.mask import AttnMask, check_mask
from megatron_magi.core.mask.slices import (
    BAND_MAX,
    BAND_MIN,
    AttnSlice,
    IntArray,
    slices_from_ranges,
    slices_of_columns,
)

Window = tuple[int, int]
PrefixSums = npt.NDArray[np.int64]


def full(total_seqlen_q: int, total_seqlen_k: int | None = None) -> AttnMask:
    """Every query sees every key."""
    total_seqlen_q = integer(total_seqlen_q, "total_seqlen_q", 0)
    given = total_seqlen_q if total_seqlen_k is None else total_seqlen_k
    total_k = integer(given, "total_seqlen_k", 0)
    return _mask([AttnSlice(0, total_seqlen_q, 0, total_k)], total_seqlen_q, total_k)


def causal(total_seqlen: int) -> AttnMask:
    """A query sees itself and everything before it."""
    return sliding_window(total_seqlen, (-1, 0))


def sliding_window(total_seqlen: int, window_size: Window) -> AttnMask:
    """A query sees ``left`` keys before itself, itself, and ``right`` keys after it."""
    total_seqlen = integer(total_seqlen, "total_seqlen", 0)
    return from_cu_seqlens([0, total_seqlen], causal=False, window_size=window_size)


def from_cu_seqlens(
    cu_seqlens: npt.ArrayLike,
    cu_seqlens_k: npt.ArrayLike | None = None,
    *,
    causal: bool = True,
    window_size: Window = (-1, -1),
    total_seqlen: int | None = None,
) -> AttnMask:
    """Packed documents: a query sees keys of its own document only.

    Args:
        cu_seqlens: [num_docs + 1] prefix sums of query tokens.
        cu_seqlens_k: the same for keys; None: as the queries. The last query of a document is
            aligned with its last key.
        causal: no key after the query.
        window_size: (left, right), -1 for no limit; with ``causal`` the right side is 0.
        total_seqlen: length with padding after the last document (queries and keys).

    Raises:
        ValueError: prefix sums that do not start at 0 or decrease, unpaired documents.
    """
    if cu_seqlens_k is None:
        q = k = _prefix_sums(cu_seqlens, "cu_seqlens")
    else:
        q, k = paired_prefix_sums({"cu_seqlens": cu_seqlens, "cu_seqlens_k": cu_seqlens_k})
    left, right = window_of(window_size)
    if flag(causal, "causal"):
        right = 0
    offset = k[1:] - q[1:]
    d_lo = BAND_MIN if left == -1 else offset - left
    d_hi = BAND_MAX if right == -1 else offset + right
    slices = slices_of_columns(q[:-1], q[1:], k[:-1], k[1:], d_lo, d_hi)
    totals = (_padded_total(int(sums[-1]), total_seqlen) for sums in (q, k))
    return AttnMask(slices, *totals)


def within_window(mask: AttnMask, window_size: Window) -> AttnMask:
    """The cells of a mask whose keys lie in a window of tokens around the query.

    A band cut by a window is a band, so the mask keeps its number of slices, or has fewer.

    Args:
        mask: self-attention, in which row i is the query and the key of token i.
        window_size: (left, right), -1 for no limit; (left, 0) leaves no key after the query.

    Raises:
        ValueError: cross-attention, in which queries and keys are other tokens.
    """
    check_mask(mask)
    if mask.total_seqlen_q != mask.total_seqlen_k:
        raise ValueError(
            f"a window requires self-attention, got {mask.total_seqlen_q} queries and "
            f"{mask.total_seqlen_k} keys; write the band of such a mask as slices"
        )
    left, right = window_of(window_size)
    slices = mask.slices.copy()
    if left != -1:
        slices[:, 4] = np.maximum(slices[:, 4], -left)
    if right != -1:
        slices[:, 5] = np.minimum(slices[:, 5], right)
    return AttnMask(slices, mask.total_seqlen_q, mask.total_seqlen_k)


def chunked(
    cu_seqlens: npt.ArrayLike, chunk_size: int, *, total_seqlen: int | None = None
) -> AttnMask:
    """Packed documents whose tokens see, causally, only their own chunk of the document.

    This is the local attention of Llama 4.

    Args:
        cu_seqlens: [num_docs + 1] prefix sums of tokens.
        chunk_size: tokens of a chunk; each document begins with a whole one.
    """
    bounds, size = _prefix_sums(cu_seqlens, "cu_seqlens"), integer(chunk_size, "chunk_size", 1)
    starts = [np.arange(start, end, size) for start, end in _documents(bounds)]
    cut = np.concatenate([*starts, bounds[-1:]])
    return from_cu_seqlens(cut if cut[0] == 0 else bounds, total_seqlen=total_seqlen)


def from_eod_positions(
    eod_positions: npt.ArrayLike,
    total_seqlen: int,
    *,
    causal: bool = True,
    window_size: Window = (-1, -1),
) -> AttnMask:
    """Documents that end with an end-of-document (EOD) token, which belongs to its document.

    Args:
        eod_positions: ascending positions of the EOD tokens.
        total_seqlen: the tokens after the last EOD form another document.
    """
    return from_cu_seqlens(
        cu_seqlens_from_eod(eod_positions, total_seqlen), causal=causal, window_size=window_size
    )


def cu_seqlens_from_eod(eod_positions: npt.ArrayLike, total_seqlen: int) -> IntArray:
    """int32 prefix sums of the documents that EOD tokens end; see ``from_eod_positions``."""
    ends = int_array(eod_positions, "eod_positions").reshape(-1) + 1
    total_seqlen = integer(total_seqlen, "total_seqlen", 0, INT32_MAX)
    bad = (ends < 1) | (ends > total_seqlen) | (np.diff(ends, prepend=0) < 1)
    for i in np.flatnonzero(bad)[:1]:
        raise ValueError(
            f"eod_positions must ascend within [0, {total_seqlen}), got {int(ends[i]) - 1} at "
            f"index {i}; pass sorted positions of one sequence"
        )
    return np.unique(np.concatenate([[0], ends, [total_seqlen]])).astype(np.int32)


def global_and_window(
    cu_seqlens: npt.ArrayLike,
    window_size: Window,
    num_global: int,
    *,
    total_seqlen: int | None = None,
) -> AttnMask:
    """A query sees a window, and in addition the first ``num_global`` keys of its document.

    The window's right side limits global keys too: with ``right = 0`` no later key is visible.
    """
    bounds = _prefix_sums(cu_seqlens, "cu_seqlens")
    left, right = window_of(window_size)
    d_lo, d_hi = (BAND_MIN if left == -1 else -left), (BAND_MAX if right == -1 else right)
    num_global = integer(num_global, "num_global", 0)
    slices = []
    for start, end in _documents(bounds):
        split = min(start + num_global, end)
        slices.append(AttnSlice(start, end, start, split, BAND_MIN, d_hi))
        slices.append(AttnSlice(start, end, split, end, d_lo, d_hi))
    return _padded(slices, int(bounds[-1]), total_seqlen)


def block_causal(
    blocks: Sequence[int] | Sequence[Sequence[int]],
    *,
    window: int | None = None,
    total_seqlen: int | None = None,
) -> AttnMask:
    """A token sees its own block and the earlier blocks of its sample (video, block diffusion).

    Args:
        blocks: block lengths of one sample, or one list of block lengths per packed sample.
        window: number of blocks that a token sees, its own included; None: all earlier ones.
    """
    seen = None if window is None else integer(window, "window", 1)
    slices, position = [], 0
    for lengths in _nested(blocks):
        starts: list[int] = []
        for length in lengths:
            starts.append(position)
            position += integer(length, "block length", 0)
            first = 0 if seen is None else max(0, len(starts) - seen)
            slices.append(AttnSlice(starts[-1], position, starts[first], position))
    return _padded(slices, position, total_seqlen)


def prefix_lm(
    cu_seqlens: npt.ArrayLike, prefix_lengths: Sequence[int], *, total_seqlen: int | None = None
) -> AttnMask:
    """Each document's prefix sees itself in both directions; its other tokens are causal."""
    bounds = _prefix_sums(cu_seqlens, "cu_seqlens")
    prefix_lengths = integers(prefix_lengths, "prefix_lengths")
    if len(prefix_lengths) != len(bounds) - 1:
        raise ValueError(
            f"prefix_lengths must have one length per document ({len(bounds) - 1}), got "
            f"{len(prefix_lengths)}; use 0 for a causal document"
        )
    slices = []
    for (start, end), prefix in zip(_documents(bounds), prefix_lengths, strict=True):
        split = start + integer(prefix, "prefix length", 0)
        if split > end:
            raise ValueError(
                f"a prefix must fit in its document, got {prefix} of {end - start} tokens; "
                f"shorten it"
            )
        slices.append(AttnSlice(start, split, start, split))
        slices.append(AttnSlice(split, end, start, end, BAND_MIN, 0))
    return _padded(slices, int(bounds[-1]), total_seqlen)


def shared_question(
    questions: Sequence[int], answers: Sequence[Sequence[int]], *, total_seqlen: int | None = None
) -> AttnMask:
    """Packed samples of one causal question followed by answers that see it and themselves.

    Args:
        questions: tokens of each sample's question.
        answers: for each sample the tokens of its answers (reward models, DPO, GRPO).
    """
    questions = integers(questions, "questions")
    answers = _rows(answers, "answers")
    if len(questions) != len(answers):
        raise ValueError(
            f"questions and answers must pair up, got {len(questions)} and {len(answers)} samples; "
            f"pass one list of answers per question"
        )
    lengths: list[int] = []
    parents: list[int] = []
    for question, replies in zip(questions, answers, strict=True):
        root = len(lengths)
        lengths += [question, *replies]
        parents += [-1] + [root] * len(replies)
    return prefix_tree(lengths, parents, total_seqlen=total_seqlen)


def prefix_tree(
    node_lengths: Sequence[int], parents: Sequence[int], *, total_seqlen: int | None = None
) -> AttnMask:
    """Prompts shared as a tree: a token sees its ancestors' tokens and, causally, its own node.

    Args:
        node_lengths: tokens of each node, laid out in this order.
        parents: index of each node's parent, smaller than its own, or -1 for a root.

    Raises:
        ValueError: unpaired arguments or a parent that is not an earlier node.
    """
    node_lengths, parents = integers(node_lengths, "node_lengths"), integers(parents, "parents")
    if len(node_lengths) != len(parents):
        raise ValueError(
            f"node_lengths and parents must pair up, got {len(node_lengths)} and {len(parents)}; "
            f"pass -1 as the parent of a root"
        )
    starts = [0]
    for length in node_lengths:
        starts.append(starts[-1] + integer(length, "node length", 0))
    slices = [s for node in range(len(parents)) for s in _tree_node(node, parents, starts)]
    return _padded(slices, starts[-1], total_seqlen)


def _tree_node(node: int, parents: Sequence[int], starts: Sequence[int]) -> Iterable[AttnSlice]:
    """Slices of one node; ancestors that lie next to each other become one."""
    q_start, q_end = starts[node], starts[node + 1]
    run_start, run_end, d_hi = q_start, q_end, 0
    child, ancestor = node, parents[node]
    while ancestor != -1:
        if not 0 <= ancestor < child:
            raise ValueError(
                f"a node's parent must be an earlier node or -1, got {ancestor} for node {child}; "
                f"lay the tree out parents first"
            )
        if starts[ancestor + 1] != run_start:
            yield AttnSlice(q_start, q_end, run_start, run_end, BAND_MIN, d_hi)
            run_end, d_hi = starts[ancestor + 1], BAND_MAX
        run_start = starts[ancestor]
        child, ancestor = ancestor, parents[ancestor]
    yield AttnSlice(q_start, q_end, run_start, run_end, BAND_MIN, d_hi)


def from_ranges(
    q_ranges: npt.ArrayLike,
    k_ranges: npt.ArrayLike,
    attn_type_map: npt.ArrayLike | None = None,
    *,
    total_seqlen_q: int,
    total_seqlen_k: int | None = None,
) -> AttnMask:
    """MagiAttention's pairs of ranges with type codes 0-3; see ``slices_from_ranges``."""
    total_k = total_seqlen_q if total_seqlen_k is None else total_seqlen_k
    return AttnMask(slices_from_ranges(q_ranges, k_ranges, attn_type_map), total_seqlen_q, total_k)


def from_dense(dense: npt.ArrayLike) -> AttnMask:
    """A mask of any boolean [q, k] matrix, cut into rectangles; for small masks and tests."""
    required = "a dense mask must be a boolean [q, k] matrix"
    cells = as_array(dense, required, "pass rows of equal length on the CPU")
    if cells.ndim != 2 or cells.dtype != np.bool_:
        raise ValueError(
            f"a dense mask must be a boolean [q, k] matrix, got {cells.dtype} {list(cells.shape)}; "
            f"True marks a visible cell"
        )
    slices: list[AttnSlice] = []
    open_runs: dict[tuple[int, int], int] = {}
    empty = np.zeros((1, cells.shape[1]), dtype=np.bool_)
    for row, cell_row in enumerate(np.concatenate([cells, empty])):
        edges = np.flatnonzero(np.diff(cell_row, prepend=False, append=False)).tolist()
        runs = set(zip(edges[0::2], edges[1::2], strict=True))
        for run in [r for r in open_runs if r not in runs]:
            slices.append(AttnSlice(open_runs.pop(run), row, *run))
        for run in runs:
            open_runs.setdefault(run, row)
    return _mask(slices, *cells.shape)


def _mask(slices: Sequence[AttnSlice], total_q: int, total_k: int) -> AttnMask:
    return AttnMask(slices, total_q, total_k)  # type: ignore[arg-type]


def _padded(slices: Sequence[AttnSlice], used: int, total_seqlen: int | None) -> AttnMask:
    total = _padded_total(used, total_seqlen)
    return _mask(slices, total, total)


def paired_prefix_sums(given: Mapping[str, npt.ArrayLike]) -> tuple[PrefixSums, PrefixSums]:
    """Checked prefix sums of queries and of keys, which are given by their arguments' names.

    Raises:
        ValueError: sums that do not start at 0 or decrease, or name different documents.
    """
    q, k = (_prefix_sums(sums, name) for name, sums in given.items())
    if len(q) != len(k):
        raise ValueError(
            f"{' and '.join(given)} must name the same documents, got {len(q) - 1} and "
            f"{len(k) - 1}; pass one length per document in both"
        )
    return q, k


def _prefix_sums(cu_seqlens: npt.ArrayLike, name: str) -> PrefixSums:
    sums = int_array(cu_seqlens, name)
    if sums.ndim != 1 or len(sums) < 1:
        raise ValueError(
            f"{name} must be integers of shape [num_docs + 1], got shape {list(sums.shape)}; "
            f"pass prefix sums of the document lengths"
        )
    if sums[0] != 0 or (np.diff(sums) < 0).any() or sums[-1] > INT32_MAX:
        raise ValueError(
            f"{name} must be integer prefix sums that start at 0 and never decrease, below 2^31, "
            f"got {sums[:8].tolist()}...; pass prefix sums of the document lengths"
        )
    return sums


def _documents(bounds: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    return list(pairwise(bounds.tolist()))


def _padded_total(used: int, total_seqlen: int | None) -> int:
    if total_seqlen is not None and integer(total_seqlen, "total_seqlen") < used:
        raise ValueError(
            f"total_seqlen must cover all documents ({used} tokens), got {total_seqlen}; "
            f"leave it out for no padding"
        )
    return used if total_seqlen is None else total_seqlen


def window_of(window_size: Window) -> Window:
    """(left, right) as ints, -1 for no limit, or an error."""
    sides = pair(window_size, "window_size", "(left, right)")
    # No sequence is longer than INT32_MAX; beyond it diagonals would wrap around.
    left, right = (min(integer(side, "window_size"), INT32_MAX) for side in sides)
    if min(left, right) < -1:
        raise ValueError(
            f"window_size must be (left, right) keys, each >= -1, got {(left, right)}; "
            f"use -1 for no limit"
        )
    return left, right


def _nested(blocks: Sequence[int] | Sequence[Sequence[int]]) -> list[list[int]]:
    """One list of block lengths per sample, even if there is only one sample."""
    if isinstance(blocks, (list, tuple)) and any(hasattr(b, "__len__") for b in blocks):
        return _rows(blocks, "blocks")
    array = int_array(blocks, "blocks")
    return array.tolist() if array.ndim == 2 else [integers(array, "blocks")]


def _rows(rows: Sequence[Sequence[int]], name: str) -> list[list[int]]:
    is_scalar = getattr(rows, "ndim", None) == 0
    if is_scalar or not hasattr(rows, "__len__") or isinstance(rows, (str, dict)):
        raise TypeError(
            f"{name} must be a list with one row of integers per sample, got {shown(rows)}; "
            f"put the rows in a list"
        )
    return [integers(row, f"each row of {name}") for row in rows]
