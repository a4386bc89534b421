"""The kernel front and its PyTorch reference against a dense fp64 answer."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_magi import AttnMask, AttnSlice, masks
from megatron_magi.core.kernel import reference, slice_table
from megatron_magi.core.kernel.attention import flex_flash_attn_func
from megatron_magi.core.kernel.backend import AttnCall, GradCall
from megatron_magi.core.kernel.reference import ReferenceBackend
from megatron_magi.core.kernel.slice_table import SliceTable, slices_tensor
from tests.dense import compare, dense_attention, random_mask, random_qkv

MASKS = {
    "causal": masks.causal(37),
    "full": masks.full(19, 23),
    "packed": masks.from_cu_seqlens([0, 1, 9, 30, 31]),
    "window": masks.from_cu_seqlens([0, 20, 41], window_size=(5, 2), causal=False),
    "block causal": masks.block_causal([[4, 7], [3, 3, 3]]),
    "prefix tree": masks.prefix_tree([5, 4, 3, 2], [-1, 0, 0, 1], total_seqlen=17),
    "pad rows": masks.from_cu_seqlens([0, 3, 8], total_seqlen=11),
    "nothing": AttnMask([], 5, 7),
    "one cell": AttnMask([AttnSlice(2, 3, 1, 2)], 4, 4),
    "bi causal square": masks.from_ranges([[0, 6]], [[0, 6]], [3], total_seqlen_q=6),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (5, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_named_masks(name: str, heads: tuple[int, int], dtype: torch.dtype) -> None:
    compare(MASKS[name], *random_qkv(MASKS[name], *heads, 8, dtype, seed=len(name)))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_capped_logits(name: str, dtype: torch.dtype) -> None:
    """Scores of about 1 are far in the bend of a cap of 0.7."""
    qkv_dout = random_qkv(MASKS[name], 4, 2, 8, dtype, seed=len(name))
    compare(MASKS[name], *qkv_dout, softcap=0.7)


@given(seed=st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_random_masks_are_exact_in_fp64(seed: int) -> None:
    mask = random_mask(seed, 24, 20)
    compare(mask, *random_qkv(mask, 4, 2, 4, torch.float64, seed))


def test_tiles_smaller_than_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_TILE_CELLS", 4 * 16 * 16)
    mask = masks.from_cu_seqlens([0, 70, 100], window_size=(40, 3), causal=False)
    compare(mask, *random_qkv(mask, 4, 2, 8, torch.float64, 3))


def test_views_with_any_row_stride() -> None:
    mask = masks.causal(12)
    packed = torch.randn(12, 3, 2, 8, dtype=torch.float64)
    q, k, v = (packed[:, i] for i in range(3))
    compare(mask, *(x.detach().requires_grad_() for x in (q, k, v)), torch.randn_like(q))


def test_gradient_of_lse() -> None:
    q, k, v, _ = random_qkv(MASKS["packed"], 2, 1, 4, torch.float64, 0)
    weight = torch.randn(q.shape[:2], dtype=torch.float64)
    _, meta = flex_flash_attn_func(q, k, v, slices=MASKS["packed"])
    got = torch.autograd.grad((meta.lse * weight).sum(), (q, k))
    _, lse = dense_attention(q, k, v, MASKS["packed"], 0.5)
    want = torch.autograd.grad((lse * weight).sum(), (q, k))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_autocast_does_not_touch_the_arithmetic() -> None:
    mask = masks.causal(32)
    q, k, v, dout = random_qkv(mask, 2, 1, 8, torch.float32, 0)
    want = flex_flash_attn_func(q, k, v, slices=mask)[0]
    grads = torch.autograd.grad(want, (q, k, v), dout)
    with torch.autocast("cpu", torch.bfloat16):
        got = flex_flash_attn_func(q, k, v, slices=mask)[0]
        assert torch.equal(got, want)
        for a, b in zip(torch.autograd.grad(got, (q, k, v), dout), grads, strict=True):
            assert torch.equal(a, b)


def test_the_default_device_changes_nothing() -> None:
    q, k, v, _ = random_qkv(MASKS["full"], 2, 1, 4, torch.float64, seed=1)
    want, _ = flex_flash_attn_func(q, k, v)
    with torch.device("meta"):
        out, _ = flex_flash_attn_func(q, k, v)
    assert torch.equal(out, want)


def test_out_dtype() -> None:
    q, k, v, _ = random_qkv(masks.causal(6), 1, 1, 4, torch.bfloat16, 2)
    out, meta = flex_flash_attn_func(q, k, v, slices=masks.causal(6), out_dtype=torch.float32)
    assert out.dtype == torch.float32 and meta.lse.dtype == torch.float32


def test_two_runs_give_equal_bits() -> None:
    mask = MASKS["prefix tree"]
    q, k, v, dout = random_qkv(mask, 4, 2, 8, torch.float32, 5)
    runs = []
    for _ in range(2):
        out, meta = flex_flash_attn_func(q, k, v, slices=mask)
        runs.append((out, meta.lse, *torch.autograd.grad(out, (q, k, v), dout)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def tensors(t: int = 4, s: int = 4, h: int = 2, g: int = 2, d: int = 4) -> list[Tensor]:
    return [torch.zeros(t, h, d), torch.zeros(s, g, d), torch.zeros(s, g, d)]


FULL = masks.full(4)


@pytest.mark.parametrize("slices", [FULL, slices_tensor(FULL)], ids=["mask", "tensor"])
@pytest.mark.parametrize(
    "good, bad, text",
    [
        ({"softmax_scale": 1.0}, {"softmax_scale": True}, "softmax_scale must be a number"),
        ({"softmax_scale": 1.0}, {"softmax_scale": [1.0]}, "softmax_scale must be a number"),
        ({"softcap": 1.0}, {"softcap": True}, "softcap must be a number"),
        ({"softcap": 1.0}, {"softcap": -1.0}, "softcap must be 0.0"),
        ({"deterministic": True}, {"deterministic": 1}, "deterministic must be True or False"),
        ({"deterministic": False}, {"deterministic": 0}, "deterministic must be True or False"),
        ({"backend": "auto"}, {"backend": ["auto"]}, "backend must be"),
        ({"backend": "auto"}, {"backend": "Auto"}, "backend must be"),
        ({"out_dtype": torch.float32}, {"out_dtype": "float32"}, "out_dtype must be"),
        ({"out_dtype": torch.float32}, {"out_dtype": torch.int32}, "out_dtype must be"),
        ({}, {"return_max_logits": 1}, "return_max_logits must be True or False"),
        ({}, {"q_ranges": torch.tensor([[0, 4]])}, "got both"),
        ({}, {"sink": torch.zeros(1, 3)}, "a sink must be"),
    ],
)
def test_bad_arguments_are_refused_also_after_good_ones(
    good: dict[str, object], bad: dict[str, object], text: str, slices: object
) -> None:
    for _ in range(2):
        flex_flash_attn_func(*tensors(), slices=slices, **good)  # type: ignore[arg-type]
        with pytest.raises((TypeError, ValueError), match=text):
            flex_flash_attn_func(*tensors(), slices=slices, **bad)  # type: ignore[arg-type]


def test_arguments_of_alike_calls_reach_each_of_them() -> None:
    """Every argument in turn, with one mask."""
    q, k, v, _ = random_qkv(FULL, 4, 2, 8, torch.float32, 1)
    arguments: list[dict[str, object]] = [
        {}, {"softmax_scale": 0.3}, {"softmax_scale": 1.0}, {"softcap": 2.0}, {"softcap": 3.0},
        {"out_dtype": torch.bfloat16}, {"backend": "reference"}, {"return_max_logits": True},
        {"sink": torch.ones(2, 4)}, {"deterministic": True},
    ]  # fmt: skip
    for _ in range(2):
        for kwargs in arguments:
            for x in (q, q.double()):
                out, meta = flex_flash_attn_func(x, k.to(x), v.to(x), slices=FULL, **kwargs)  # type: ignore[arg-type]
                want, want_meta = flex_flash_attn_func(
                    x,
                    k.to(x),
                    v.to(x),
                    slices=masks.full(4),
                    **kwargs,  # type: ignore[arg-type]
                )
                assert out.dtype == want.dtype and torch.equal(out, want), kwargs
                assert torch.equal(meta.lse, want_meta.lse)
                assert (meta.max_logits is None) == ("return_max_logits" not in kwargs)


@pytest.mark.parametrize("kind", ["mask", "tensor"])
def test_what_is_kept_of_calls_dies_with_their_mask(kind: str) -> None:
    """At once: what is kept in a table does not refer to it. No other test has these slices: equal
    slices share a table, which would then live on."""
    gc.collect()
    before = len(slice_table._by_tensor)
    mask = AttnMask([AttnSlice(1, 3, 0, 3, -1, 1)], 4, 4)
    slices = mask if kind == "mask" else slices_tensor(mask)
    for heads in (1, 2):
        flex_flash_attn_func(*tensors(h=2 * heads), slices=slices)
    assert len(slice_table._by_tensor) == before + 1
    rows = slice_table.tensor_of_mask(mask) if kind == "mask" else slices
    table = weakref.ref(slice_table.slice_table(rows, 4, 4))
    assert len(table().calls) >= 2  # type: ignore[union-attr]
    gc.disable()
    try:
        del mask, slices, rows
        slice_table._from_bytes.cache_clear()
        assert len(slice_table._by_tensor) == before and table() is None
    finally:
        gc.enable()


def test_the_reference_makes_delta_from_out() -> None:
    mask = masks.from_cu_seqlens([0, 3, 10])
    q, k, v, dout = random_qkv(mask, 2, 2, 4, torch.float64, seed=1)
    q, k, v = (x.detach() for x in (q, k, v))
    kernel, table = ReferenceBackend(), SliceTable(mask.slices, 10, 10)
    out, lse = kernel.forward(AttnCall(q, k, v, table, 0.5))
    given = kernel.backward(
        AttnCall(q, k, v, table, 0.5), GradCall(dout, lse, (out * dout).sum(-1))
    )
    made = kernel.backward(AttnCall(q, k, v, table, 0.5), GradCall(dout, lse, out=out))
    assert all(map(torch.equal, given, made))
    with pytest.raises(ValueError, match="either delta or out is required"):
        kernel.backward(AttnCall(q, k, v, table, 0.5), GradCall(dout, lse))
