"""The kernel front and its PyTorch reference against a dense fp64 answer."""

import gc
import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_magi import AttnMask, AttnSlice, masks
from megatron_magi.core.kernel import given_slices, reference, slice_table
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


def test_the_derivative_of_capped_logits() -> None:
    """Of out and lse, by differences."""
    q, k, v, _ = random_qkv(MASKS["pad rows"], 2, 1, 4, torch.float64, 5)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, meta = flex_flash_attn_func(q, k, v, slices=MASKS["pad rows"], softcap=0.7)
        return out, meta.lse[:8]  # behind them no row sees a key: their lse is -inf

    assert torch.autograd.gradcheck(attention, (q, k, v))


def test_a_far_cap_changes_little_and_a_near_one_bounds() -> None:
    q, k, v, _ = random_qkv(masks.causal(40), 4, 2, 8, torch.float64, 2)
    asked = {"slices": masks.causal(40), "return_max_logits": True}
    out, plain = flex_flash_attn_func(q, k, v, **asked)
    far = flex_flash_attn_func(q, k, v, **asked, softcap=1e6)[0]
    torch.testing.assert_close(far, out, rtol=1e-9, atol=1e-9)
    _, near = flex_flash_attn_func(q * 100, k, v, **asked, softcap=0.5)
    assert plain.max_logits is not None and near.max_logits is not None
    assert (plain.max_logits > 0.5).all() and (near.max_logits <= 0.5).all()


@pytest.mark.parametrize("softcap", [-1.0, 1e-40, 1e31, 1e300, math.inf, math.nan])
def test_a_cap_that_is_none_is_refused(softcap: float) -> None:
    q = torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match=r"softcap must be .*; pass"):
        flex_flash_attn_func(q, q, q, softcap=softcap)


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


def test_ranges_with_type_codes() -> None:
    q_ranges = torch.tensor([[0, 10], [10, 25]], dtype=torch.int32)
    types = torch.tensor([1, 2], dtype=torch.int32)
    mask = masks.from_ranges(q_ranges.numpy(), q_ranges.numpy(), types.numpy(), total_seqlen_q=25)
    q, k, v, _ = random_qkv(mask, 2, 2, 4, torch.float64, 1)
    out, meta = flex_flash_attn_func(q, k, v, q_ranges, q_ranges, types)
    want, lse = dense_attention(q, k, v, mask, 0.5)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(meta.lse, lse)


def test_ranges_changed_in_place_are_noticed() -> None:
    ranges = torch.tensor([[0, 8]], dtype=torch.int32)
    q, k, v, _ = random_qkv(masks.full(8), 1, 1, 4, torch.float64, 1)
    flex_flash_attn_func(q, k, v, ranges, ranges)
    ranges[0, 1] = 5
    _, meta = flex_flash_attn_func(q, k, v, ranges, ranges)
    assert (meta.lse[5:] == -math.inf).all() and meta.lse[:5].isfinite().all()
    slices = slices_tensor(masks.full(8))
    flex_flash_attn_func(q, k, v, slices=slices)
    slices[0, 1] = 3
    _, meta = flex_flash_attn_func(q, k, v, slices=slices)
    assert (meta.lse[3:] == -math.inf).all()


def test_remembered_ranges_die_with_their_tensor() -> None:
    q, k, v, _ = random_qkv(masks.full(8), 1, 1, 4, torch.float64, 1)
    gc.collect()
    before = len(given_slices._range_tensors)
    for types in (None, torch.tensor([1])):
        ranges = torch.tensor([[0, 8]])
        flex_flash_attn_func(q, k, v, ranges, ranges, types)
    flex_flash_attn_func(q, k, v)
    del ranges, types
    gc.collect()
    assert len(given_slices._range_tensors) == before


@pytest.mark.parametrize("kind", ["mask", "ranges"])
def test_training_after_inference_with_the_same_mask(kind: str) -> None:
    mask, ranges = masks.full(8), torch.tensor([[0, 8]])
    q, k, v, dout = random_qkv(mask, 1, 1, 4, torch.float64, 1)
    slices = {"slices": mask} if kind == "mask" else {"q_ranges": ranges, "k_ranges": ranges}
    with torch.inference_mode():
        flex_flash_attn_func(q, k, v, **slices)
    flex_flash_attn_func(q, k, v, **slices)[0].backward(dout)


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


def test_no_ranges_mean_full_attention_and_scale_is_used() -> None:
    q, k, v, _ = random_qkv(masks.full(6, 9), 2, 1, 4, torch.float64, 2)
    out, _ = flex_flash_attn_func(q, k, v, softmax_scale=0.1)
    torch.testing.assert_close(out, dense_attention(q, k, v, masks.full(6, 9), 0.1)[0])


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


def test_gradients_of_lse_alone() -> None:
    q, k, v, _ = random_qkv(masks.causal(9), 4, 2, 8, torch.float64, 5)
    _, meta = flex_flash_attn_func(q, k, v, slices=masks.causal(9))
    dense = torch.einsum("tgrd,sgd->tgrs", q.unflatten(1, (2, 2)), k) * 8**-0.5
    hidden = ~torch.ones(9, 9, dtype=torch.bool).tril()[:, None, None]
    want = dense.masked_fill(hidden, -torch.inf).logsumexp(-1).flatten(1)
    torch.testing.assert_close(meta.lse, want)
    for a, b in zip(
        torch.autograd.grad(meta.lse.sin().sum(), (q, k)),
        torch.autograd.grad(want.sin().sum(), (q, k)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def tensors(t: int = 4, s: int = 4, h: int = 2, g: int = 2, d: int = 4) -> list[Tensor]:
    return [torch.zeros(t, h, d), torch.zeros(s, g, d), torch.zeros(s, g, d)]


@pytest.mark.parametrize(
    "change, error, text",
    [
        (lambda x: x.__setitem__(1, x[1].double()), TypeError, "share q's dtype torch.float32"),
        (lambda x: x.__setitem__(2, x[2].double()), TypeError, "share q's dtype torch.float32"),
        (lambda x: x.__setitem__(1, x[1].to("meta")), ValueError, "must be on q's device cpu"),
        (lambda x: x.__setitem__(0, x[0].int()), TypeError, "must be fp16, bf16"),
        (lambda x: x.__setitem__(0, x[0][None]), ValueError, "fold the batch into the tokens"),
        (lambda x: x.__setitem__(1, x[1][:3]), ValueError, "k and v must have equal tokens"),
        (lambda x: x.__setitem__(1, x[1][..., :3]), ValueError, "and k q's head_dim 4, got"),
        (lambda x: x.__setitem__(2, x[2][..., :0]), ValueError, r"at least 1.*\[4, 2, 0\]"),
        (lambda x: x.__setitem__(0, torch.zeros(4, 3, 4)), ValueError, "got 3 and 2"),
        (lambda x: x.__setitem__(slice(1, 3), [torch.zeros(4, 0, 4)] * 2), ValueError, "and 0"),
        (lambda x: x.__setitem__(0, torch.zeros(4, 4, 2).mT), ValueError, "contiguous in head_dim"),
        (lambda x: x.__setitem__(2, torch.zeros(4, 4, 2).mT), ValueError, "contiguous in head_dim"),
        (lambda x: x.__setitem__(2, x[2].to("meta")), ValueError, "must be on q's device cpu"),
    ],
)
def test_bad_tensors_are_refused(change: object, error: type, text: str) -> None:
    """Also after a good call with the same mask."""
    good = tensors()
    flex_flash_attn_func(*good, slices=FULL)
    x = tensors()
    change(x)  # type: ignore[operator]
    for kwargs in ({}, {"slices": FULL}):
        with pytest.raises(error, match=text):
            flex_flash_attn_func(*x, **kwargs)


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


def test_bad_slices_are_refused() -> None:
    x = tensors()
    ranges = torch.tensor([[0, 4]])
    for kwargs, text in (
        ({"slices": torch.zeros(1, 6)}, "slices must be int32"),
        ({"slices": torch.zeros(1, 5, dtype=torch.int32)}, r"got torch.int32 \[1, 5\]"),
        ({"q_ranges": ranges}, "must both be given"),
        ({"q_ranges": ranges, "k_ranges": ranges, "slices": masks.full(4)}, "got both"),
        ({"q_ranges": ranges + 1, "k_ranges": ranges}, r"q_end <= total_seqlen_q = 4"),
        ({"slices": masks.full(5)}, "q's 4 and k's 4 tokens, got one with total_seqlen_q = 5"),
        ({"slices": masks.full(3, 4)}, "got one with total_seqlen_q = 3"),
        ({"backend": "cudnn"}, "must be 'auto', 'cuda', 'fa4', 'flex' or 'reference', got 'cudnn'"),
    ):
        with pytest.raises(ValueError, match=text):
            flex_flash_attn_func(*x, **kwargs)
    double = torch.tensor([[0, 4], [0, 4]])
    with pytest.raises(ValueError, match="must not share a cell"):
        flex_flash_attn_func(*x, double, double)
    with pytest.raises(NotImplementedError, match="needs CUDA tensors, got cpu"):
        flex_flash_attn_func(*x, backend="cuda")


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
