"""The Hopper forward against the dense fp64 definition: every variant, poisoned outputs."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_magi import masks
from megatron_magi.core.kernel.backend import AttnCall
from megatron_magi.core.kernel.hopper import choice
from megatron_magi.core.kernel.hopper.launch_values import HeadsKey
from megatron_magi.core.kernel.slice_table import SliceTable
from tests.core.kernel.cuda_forward_cases import (
    BF16,
    FP16,
    FP32,
    MASKS,
    WIDTHS,
    Case,
    backend,
    check,
    draw,
    run_variant,
    variants,
)
from tests.dense import assert_as_good, dense_attention, dense_largest, random_mask

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not hopper, reason="needs a Hopper GPU")]

REGULAR = [
    case
    for name in MASKS
    for case in (
        Case(name),
        Case(name, (2, 2), 192, 128),
        Case(name, (4, 2), 256),
        Case(name, (4, 2), 96),
    )
]
FEATURES = [
    replace(case, mask=name)
    for name in ("packed", "window", "pad rows")
    for case in (
        Case("", (1, 1)), Case("", (64, 8)), Case("", (3, 1), 64), Case("", (8, 1), 64, dtype=FP16),
        Case("", (6, 2), 128, dtype=FP16), Case("", (16, 1)), Case("", out_dtype=FP32),
        Case("", strided=True), Case("", (8, 2), 64, strided=True), Case("", stages=2),
        Case("", (8, 1), 128, dtype=FP16, stages=3), Case("", (4, 4), 64, stages=2),
        Case("", (4, 4), 192, 128), Case("", (8, 2), 192, 128, FP16),
        Case("", (6, 3), 192, 128, stages=2),
        Case("", (4, 4), 192, 128, out_dtype=FP32, strided=True),
        Case("", (16, 2), 256), Case("", (3, 3), 256, dtype=FP16), Case("", (8, 1), 256, stages=2),
        Case("", (4, 4), 256, out_dtype=FP32, strided=True),
        Case("", (16, 2), 96), Case("", (3, 3), 96, dtype=FP16), Case("", (8, 1), 96, stages=2),
        Case("", (4, 4), 96, out_dtype=FP32, strided=True), Case("", (8, 2), 96, strided=True),
    )
]  # fmt: skip


@pytest.mark.parametrize("case", REGULAR + FEATURES, ids=str)
def test_named(case: Case) -> None:
    check(case, MASKS[case.mask], zlib.crc32(str(case).encode()))


@pytest.mark.parametrize("block", range(20))
def test_random_masks(block: int) -> None:
    """2,000 masks by seed; each with one random variant, shape and dtype."""
    for seed in range(100 * block, 100 * block + 100):
        rng = np.random.default_rng(seed)
        mask = random_mask(seed, int(rng.integers(1, 500)), int(rng.integers(1, 500)))
        heads_kv, group = int(rng.choice([1, 2, 3])), int(rng.choice([1, 2, 4, 8]))
        case = Case(
            f"seed {seed}",
            (heads_kv * group, heads_kv),
            *WIDTHS[rng.integers(len(WIDTHS))],
            BF16 if rng.random() < 0.5 else FP16,
            FP32 if rng.random() < 0.3 else None,
            strided=rng.random() < 0.3,
            stages=int(rng.choice([1, 1, 1, 2])),
            softcap=float(rng.choice([0.0, 0.0, 0.0, 2.0])),
            magnitude=float(rng.choice([1.0, 1.0, 3.0])),
        )
        options = variants(case)
        try:
            check(case, mask, seed, [options[rng.integers(len(options))]])
        except AssertionError as error:
            raise AssertionError(f"{case}: {mask.slices.tolist()}") from error


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_blocks_with_several_items(widths: tuple[int, int]) -> None:
    """More items than processors, of one key tile and of many, with and without other items of
    their length before them: what a block keeps from one item must not reach the next."""
    lengths = [3, 60, 900, 128, 1, 400, 64, 700, 33, 300, 8, 500]
    mask = masks.from_cu_seqlens(np.cumsum([0, *lengths]).tolist())
    check(Case("", (16, 16), *widths), mask, 3)
    check(Case("", (32, 4), *widths, dtype=FP16), mask, 4)


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_two_runs_give_equal_bits(widths: tuple[int, int]) -> None:
    mask = masks.from_cu_seqlens([0, 900, 1000, 4000])
    q, k, v = draw(Case("", (16, 2), *widths), mask, 1)
    runs = [backend().forward(AttnCall(q, k, v, SliceTable.of(mask), 0.1)) for _ in range(3)]
    for out, lse in runs[1:]:
        assert torch.equal(out, runs[0][0]) and torch.equal(lse, runs[0][1])


def test_two_streams_at_once() -> None:
    mask = masks.causal(3000)
    q, k, v = draw(Case("", (16, 2)), mask, 2)
    table, kernel = SliceTable.of(mask), backend()
    want, _ = kernel.forward(AttnCall(q, k, v, table, 0.1))
    streams = [torch.cuda.Stream() for _ in range(3)]
    outs = []
    torch.cuda.synchronize()
    for _ in range(4):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(kernel.forward(AttnCall(q, k, v, table, 0.1))[0])
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in outs)


@pytest.mark.parametrize("out_dtype", [None, FP32])
def test_few_rows_with_many_keys_are_split(out_dtype: torch.dtype | None) -> None:
    mask = masks.from_ranges(
        [[0, 300], [350, 400]],
        [[0, 80_000], [20_000, 80_000]],
        [1, 0],
        total_seqlen_q=410,
        total_seqlen_k=80_000,
    )
    case, table = Case("", (2, 1)), SliceTable.of(mask)
    q, k, v = draw(case, mask, 6)
    work = choice.chosen_forward(table, HeadsKey(2, 1, 128, 128, q.device))
    assert work.num_parts > 1
    out, lse = backend().forward(AttnCall(q, k, v, table, 0.1), out_dtype=out_dtype)
    again = backend().forward(AttnCall(q, k, v, table, 0.1), out_dtype=out_dtype)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    wide = dense_attention(q.double(), k.double(), v.double(), mask, 0.1)
    same = dense_attention(q, k, v, mask, 0.1)
    names = ("out", "lse")
    assert_as_good(
        {"out": out, "lse": lse},
        dict(zip(names, wide, strict=True)),
        dict(zip(names, same, strict=True)),
        BF16,
        {"out": v.abs().max().item(), "lse": 1.0},
    )
    prev = (torch.zeros(q.shape, device="cuda"), torch.full(q.shape[:2], -torch.inf, device="cuda"))
    merged = backend().forward(AttnCall(q, k, v, table, 0.1), prev=prev)
    assert merged[0] is prev[0] and (merged[1] - lse).nan_to_num(0.0).abs().max() < 1e-5


@pytest.mark.parametrize("out_dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("rows", [[(0, 130), (131, 700)], [(0, 40), (300, 301)], [(37, 37)]])
@pytest.mark.parametrize("num_k", [900, 60_000], ids=["short walks", "split walks"])
def test_rows_that_no_slice_covers_may_stay(
    num_k: int, rows: list[tuple[int, int]], out_dtype: torch.dtype
) -> None:
    """Into an earlier result of other rows: equal bits in the covered rows, nothing elsewhere."""
    slices = [(a, b, 0, num_k, -(b - 1), num_k - 1 - a) for a, b in rows if a < b]
    table = SliceTable(np.array(slices, np.int32).reshape(-1, 6), 1000, num_k)
    mask = masks.full(1000, num_k)
    q, k, v = draw(Case("", (8, 2)), mask, 3)
    fresh = backend().forward(AttnCall(q, k, v, table, 0.1), out_dtype=out_dtype)
    into = torch.full(q.shape, 7.0, device="cuda", dtype=out_dtype), torch.full_like(fresh[1], 7.0)
    made = backend().forward(AttnCall(q, k, v, table, 0.1), into=into)
    assert made[0] is into[0] and made[1] is into[1]
    covered = torch.zeros(1000, dtype=torch.bool, device="cuda")
    for a, b in rows:
        covered[a:b] = True
    for x, want in zip(into, fresh, strict=True):
        assert torch.equal(x[covered], want[covered]) and (x[~covered] == 7).all()


def test_many_tokens_need_64_bit_offsets() -> None:
    tokens = 140_000  # x 128 heads x 128 = 2.3e9 elements
    mask = masks.sliding_window(tokens, (100, 0))
    q = torch.randn(tokens, 128, 128, device="cuda", dtype=BF16)
    k, v = (torch.randn(tokens, 1, 128, device="cuda", dtype=BF16) for _ in range(2))
    out, lse = backend().forward(AttnCall(q, k, v, SliceTable.of(mask), 0.088))
    tail = slice(tokens - 300, tokens)
    sub = masks.sliding_window(300, (100, 0))
    want, want_lse = dense_attention(
        q[tail, :, :].double(), k[tail].double(), v[tail].double(), sub, 0.088
    )
    assert (out[tail][100:].double() - want[100:]).abs().max() < 0.02
    assert (lse[tail][100:].double() - want_lse[100:]).abs().max() < 1e-3


def test_large_scores_do_not_overflow() -> None:
    mask = masks.causal(400)
    q, k, v = (40 * x for x in draw(Case("", (2, 2)), mask, 3))
    out, lse = backend().forward(AttnCall(q, k, v, SliceTable.of(mask), 1.0))
    want, want_lse = dense_attention(q.double(), k.double(), v.double(), mask, 1.0)
    assert (lse - want_lse).abs().max() < 1e-5 * want_lse.abs().max()
    assert (out.double() - want).abs().max() < 0.02 * want.abs().max()


@pytest.mark.parametrize("name", ["causal", "full", "window", "packed"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_maxima_that_climb(name: str, dtype: torch.dtype, widths: tuple[int, int]) -> None:
    """Along the keys the logits climb by less and by more than exponentials of an earlier maximum
    can hold (about 18 and 300), and fall. Of causal rows some end on every level."""
    case, mask = Case(name, (8, 2), *widths, dtype), MASKS[name]
    q, k, v = draw(case, mask, 8)
    levels = torch.tensor([0.0, 18.0, 300.0, 318.0, 0.0, 40.0, 400.0, 410.0], device="cuda")
    level = levels[torch.arange(len(k), device="cuda") // 97 % len(levels)]
    q, k = 0.1 * q, 0.1 * k
    q[..., :16] += 8.0
    k[..., :16] += (level * case.head_dim**0.5 / (16 * 8.0))[:, None, None].to(dtype)
    how = mask, case.head_dim**-0.5
    names = "out", "lse"
    # Scores of this size are far off in 16 bits, and the kernels keep them in fp32.
    exact, near = (
        dict(zip(names, dense_attention(q.to(x), k.to(x), v.to(x), *how), strict=True))
        for x in (torch.float64, FP32)
    )
    for variant in variants(case):
        out, lse = run_variant(case, mask, variant, (q, k, v))
        got, scales = {"out": out, "lse": lse}, {"out": v.abs().max().item(), "lse": 1.0}
        assert_as_good(got, exact, near, dtype, scales)
        finite = exact["lse"].isfinite()
        assert (lse.double() - exact["lse"])[finite].abs().max() < 2e-3
        most = torch.full((8,), -torch.inf, device="cuda")
        again = run_variant(case, mask, variant, (q, k, v), most)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)
        torch.testing.assert_close(most.double(), dense_largest(q, k, *how), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_largest_logits_beside_those_that_are_known(dtype: torch.dtype) -> None:
    """Steps without maxima look for a larger logit only where there may be one: a larger number
    that is known stays, a smaller one does not hide the largest, and a score of nan neither."""
    case, mask = Case("", (8, 2), 64, dtype=dtype), masks.full(300, 1300)
    q, k, v = draw(case, mask, 5)
    largest = dense_largest(q, k, mask, case.head_dim**-0.5)
    broken = k.clone()
    broken[700] = torch.nan
    others = torch.cat((k[:700], k[701:]))
    of_others = dense_largest(q, others, masks.full(300, 1299), case.head_dim**-0.5)
    for variant in variants(case):
        for off in (-1.0, -1e-3, 1e-3, 1.0):
            known = (largest + off).float()
            most = known.clone()
            run_variant(case, mask, variant, (q, k, v), most)
            want = torch.maximum(known.double(), largest)
            torch.testing.assert_close(most.double(), want, rtol=1e-5, atol=1e-5)
        most = torch.full((8,), -torch.inf, device="cuda")
        run_variant(case, mask, variant, (q, broken, v), most)
        torch.testing.assert_close(most.double(), of_others, rtol=1e-5, atol=1e-5)
