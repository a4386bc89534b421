"""Every builder against the sentence that defines it, cell by cell."""

from collections.abc import Callable

import numpy as np
import pytest

from megatron_magi import masks
from megatron_magi.core.mask import AttnMask


def expect(mask: AttnMask, rule: Callable[[int, int], bool]) -> None:
    dense = mask.to_dense()
    want = [[rule(q, k) for k in range(mask.total_seqlen_k)] for q in range(mask.total_seqlen_q)]
    assert np.array_equal(dense, np.array(want, dtype=bool).reshape(dense.shape))


def document(cu: list[int], q: int) -> int:
    """Index of the document that holds token q, -1 for padding."""
    return next((i for i in range(len(cu) - 1) if cu[i] <= q < cu[i + 1]), -1)


def same(cu: list[int], q: int, k: int) -> bool:
    return document(cu, q) == document(cu, k) != -1


CU = [0, 3, 3, 4, 11]


def test_full_and_causal() -> None:
    expect(masks.full(5, 7), lambda q, k: True)
    expect(masks.causal(7), lambda q, k: k <= q)


@pytest.mark.parametrize("window", [(2, 0), (0, 3), (1, 2), (-1, 1), (1, -1)])
def test_sliding_window(window: tuple[int, int]) -> None:
    left, right = window
    expect(
        masks.sliding_window(9, window),
        lambda q, k: (left < 0 or k - q >= -left) and (right < 0 or k - q <= right),
    )


@pytest.mark.parametrize("window", [(-1, -1), (2, 0), (0, 0), (2, 1), (-1, 1), (1, -1), (50, 50)])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_documents(window: tuple[int, int], causal: bool) -> None:
    left, right = window
    mask = masks.from_cu_seqlens(CU, causal=causal, window_size=window, total_seqlen=13)
    expect(
        mask,
        lambda q, k: (
            same(CU, q, k)
            and (left < 0 or k - q >= -left)
            and (right < 0 or k - q <= right)
            and not (causal and k > q)
        ),
    )
    assert mask.num_slices == 3


@pytest.mark.parametrize("window", [(-1, -1), (2, 0), (0, 0), (2, 1), (-1, 1), (1, -1), (50, 50)])
def test_a_window_cuts_any_mask(window: tuple[int, int]) -> None:
    left, right = window
    mask = masks.prefix_lm([0, 5, 12], [3, 0], total_seqlen=13)
    seen = mask.to_dense()
    cut = masks.within_window(mask, window)
    expect(
        cut,
        lambda q, k: (
            bool(seen[q, k]) and (left < 0 or k - q >= -left) and (right < 0 or k - q <= right)
        ),
    )
    assert cut.num_slices <= mask.num_slices
    packed = masks.from_cu_seqlens(CU, causal=False)
    assert masks.within_window(packed, window) == masks.from_cu_seqlens(
        CU, causal=False, window_size=window
    )


def test_a_window_of_cross_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="requires self-attention, got 4 queries and 6 keys"):
        masks.within_window(AttnMask([[0, 4, 0, 6, -9, 9]], 4, 6), (1, 0))


@pytest.mark.parametrize("size", [1, 3, 4, 50])
def test_chunks_begin_with_their_document(size: int) -> None:
    expect(
        masks.chunked(CU, size, total_seqlen=13),
        lambda q, k: (
            same(CU, q, k)
            and k <= q
            and (q - CU[document(CU, q)]) // size == (k - CU[document(CU, k)]) // size
        ),
    )
    assert masks.chunked([0], size) == masks.full(0)


def test_key_documents_of_other_lengths_align_at_the_end() -> None:
    cu_k = [0, 2, 2, 7, 9]
    mask = masks.from_cu_seqlens(CU, cu_k, causal=True)
    expect(
        mask,
        lambda q, k: (
            document(CU, q) == document(cu_k, k)
            and k - cu_k[document(CU, q) + 1] <= q - CU[document(CU, q) + 1]
        ),
    )


def test_eod_positions_close_their_document() -> None:
    assert masks.cu_seqlens_from_eod([2, 3], 9).tolist() == [0, 3, 4, 9]
    assert masks.cu_seqlens_from_eod([8], 9).tolist() == [0, 9]
    assert masks.cu_seqlens_from_eod([], 9).tolist() == [0, 9]
    cu = [0, 3, 4, 9]
    assert masks.from_eod_positions([0, 1, 2], 5) == masks.from_cu_seqlens([0, 1, 2, 3, 5])
    expect(masks.from_eod_positions([2, 3], 9), lambda q, k: same(cu, q, k) and k <= q)


@pytest.mark.parametrize("window", [(2, 0), (1, 1), (0, -1), (-1, 0)])
@pytest.mark.parametrize("num_global", [0, 1, 2, 20])
def test_global_tokens_beside_a_window(window: tuple[int, int], num_global: int) -> None:
    left, right = window
    mask = masks.global_and_window(CU, window, num_global, total_seqlen=12)
    expect(
        mask,
        lambda q, k: (
            same(CU, q, k)
            and (k - CU[document(CU, q)] < num_global or left < 0 or k - q >= -left)
            and (right < 0 or k - q <= right)
        ),
    )


@pytest.mark.parametrize("window", [None, 1, 2, 9])
@pytest.mark.parametrize("blocks", [[4, 4, 4], [[3, 1], [2, 0, 2, 2], [5]]])
def test_block_causal(blocks: list, window: int | None) -> None:
    samples = [blocks] if isinstance(blocks[0], int) else blocks
    block_of = [(s, b) for s, sample in enumerate(samples) for b, n in enumerate(sample)
                for _ in range(n)]  # fmt: skip
    mask = masks.block_causal(blocks, window=window)
    expect(
        mask,
        lambda q, k: (
            block_of[q][0] == block_of[k][0]
            and 0 <= block_of[q][1] - block_of[k][1] < (window or 99)
        ),
    )


def test_prefix_lm() -> None:
    prefixes = [2, 0, 1, 7]
    expect(
        masks.prefix_lm(CU, prefixes),
        lambda q, k: (
            same(CU, q, k)
            and (k <= q or max(q, k) - CU[document(CU, q)] < prefixes[document(CU, q)])
        ),
    )


def test_shared_question() -> None:
    owner = [0] * 3 + [1] * 2 + [2] * 4 + [3] * 2 + [4] * 1
    question = {1: 0, 2: 0, 4: 3}
    mask = masks.shared_question([3, 2], [[2, 4], [1]])
    expect(
        mask,
        lambda q, k: owner[k] == question.get(owner[q]) or (owner[q] == owner[k] and k <= q),
    )
    assert mask.num_slices == 6, "the first answer lies behind its question: one causal slice"


def test_prefix_tree() -> None:
    lengths, parents = [2, 3, 1, 0, 2, 2, 1], [-1, 0, 1, 1, 0, 3, -1]
    node_of = [n for n, length in enumerate(lengths) for _ in range(length)]

    def ancestors(node: int) -> list[int]:
        return [] if node == -1 else [node, *ancestors(parents[node])]

    expect(
        masks.prefix_tree(lengths, parents, total_seqlen=13),
        lambda q, k: (
            max(q, k) < 11
            and node_of[k] in ancestors(node_of[q])
            and (node_of[q] != node_of[k] or k <= q)
        ),
    )


@pytest.mark.parametrize(
    "build, text",
    [
        (lambda: masks.from_cu_seqlens([[0, 4]]), "must be integers of shape"),
        (lambda: masks.from_cu_seqlens([0, 4], [0, 2, 4]), "got 1 and 2"),
        (lambda: masks.from_cu_seqlens([0, 4], total_seqlen=3), r"\(4 tokens\), got 3"),
        (lambda: masks.prefix_lm([0, 4], [5]), "got 5 of 4 tokens"),
        (lambda: masks.prefix_lm([0, 4], []), "one length per document"),
        (lambda: masks.prefix_tree([1, 1], [-1, 1]), "must be an earlier node or -1, got 1"),
        (lambda: masks.prefix_tree([1, 1], [-1]), "must pair up, got 2 and 1"),
        (lambda: masks.shared_question([1], []), "must pair up, got 1 and 0"),
        (lambda: masks.from_eod_positions([5, 4], 9), "must ascend within"),
        (lambda: masks.from_eod_positions([9], 9), "must ascend within"),
    ],
)
def test_bad_arguments_are_refused(build: Callable[[], AttnMask], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        build()


def test_no_tokens_are_a_mask() -> None:
    assert masks.sliding_window(0, (3, 0)).to_dense().shape == (0, 0)


@pytest.mark.parametrize("most", [2**31, 2**63 - 1, 2**100])
def test_windows_longer_than_any_sequence_are_no_limit(most: int) -> None:
    """Where keys are more than queries, a diagonal is a sum that must not wrap around."""
    q, k = [0, 6, 16], [0, 16, 40]
    for sides in ((most, 0), (0, most), (most, most)):
        same = tuple(-1 if side == most else side for side in sides)
        ours, want = (
            masks.from_cu_seqlens(q, k, causal=False, window_size=window).to_dense()
            for window in (sides, same)
        )
        np.testing.assert_array_equal(ours, want)


@pytest.mark.parametrize("total", [2**31, 2**32 + 16, 2**100])
def test_more_tokens_than_int32_holds_do_not_wrap_around(total: int) -> None:
    for build in (masks.cu_seqlens_from_eod, masks.from_eod_positions):
        with pytest.raises(ValueError, match=f"total_seqlen must be between 0 and .* got {total};"):
            build([3, 9], total)
