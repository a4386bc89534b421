"""flex_flash_attn_func by its published signature: ranges, types, sinks; calc_attn's refusals."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megatron_magi import magi_attention as api
from megatron_magi import masks
from megatron_magi.core.kernel import op
from megatron_magi.core.kernel.torch_flex import FlexBackend
from tests.dense import (
    NAMES,
    assert_as_good_as_dense,
    dense_attention,
    dense_largest,
    random_qkv,
    with_sinks,
)
from tests.magi_attention.one_rank import varlen_key
from tests.magi_attention.typed_masks import count_cells, random_typed


def test_usage_ranges_and_types() -> None:
    """Two documents, the first full, the second causal with a full prompt before it."""
    q, k, v = (torch.randn(10, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    out, meta = api.flex_flash_attn_func(
        q, k, v,
        q_ranges=torch.tensor([[0, 4], [4, 10]], dtype=torch.int32),
        k_ranges=torch.tensor([[0, 4], [4, 10]], dtype=torch.int32),
        attn_type_map=torch.tensor([0, 1], dtype=torch.int32),
    )  # fmt: skip
    out.sum().backward()
    assert out.shape == q.shape and meta.lse.shape == (10, 4) and meta.max_logits is None
    assert torch.allclose(out[4, :2], v[4, 0])  # the first causal row sees itself alone
    assert q.grad is not None and v.grad is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(6))
def test_random_types_against_dense(seed: int, dtype: torch.dtype) -> None:
    typed = random_typed(seed, 19)
    mask = masks.from_dense(count_cells(typed, 19, 19) > 0)
    q, k, v, dout = random_qkv(mask, 4, 2, 8, dtype, seed)
    codes = torch.tensor([t.to_int_type() for t in typed[2]], dtype=torch.int32)
    out, meta = api.flex_flash_attn_func(
        q, k, v, typed[0].to_tensor(), typed[1].to_tensor(), codes, deterministic=True
    )
    ours = dict(
        zip(NAMES, (out, meta.lse, *torch.autograd.grad(out, (q, k, v), dout)), strict=True)
    )
    assert_as_good_as_dense(ours, (q, k, v, dout), mask, dtype)


def sink_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, sink: Tensor, layout: str
) -> tuple[Tensor, Tensor]:
    """Dense attention with the sinks as extra keys whose values are zero."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("thd,shd->hts", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~torch.from_numpy(mask.to_dense()), -torch.inf)
    per_row = sink.expand(len(q), -1, -1) if layout == "sh" else sink
    both = torch.cat([scores, per_row.permute(2, 0, 1)], -1)
    probs = both.softmax(-1)[..., : len(k)]
    return torch.einsum("hts,shd->thd", probs, v), both.logsumexp(-1).T


@pytest.mark.parametrize("layout, shape", [("sh", (3, 4)), ("ssh", (20, 2, 4)), ("sh", (1, 4))])
def test_sink_against_dense(layout: str, shape: tuple[int, ...]) -> None:
    mask = masks.from_cu_seqlens([0, 7, 16], total_seqlen=20)  # four rows see nothing
    q, k, v, dout = random_qkv(mask, 4, 2, 8, torch.float64, 1)
    sink = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    ranges = torch.tensor([[0, 7], [7, 16]])
    out, meta = api.flex_flash_attn_func(
        q, k, v, ranges, ranges, torch.tensor([1, 1]), sink=sink, sink_layout=layout
    )
    want = sink_attention(q, k, v, mask, sink, layout)
    weight = torch.randn_like(want[1])
    for ours, dense in (((out, meta.lse), want),):
        torch.testing.assert_close(ours[0], dense[0])
        torch.testing.assert_close(ours[1], dense[1])
        inputs = (q, k, v, sink)
        got = torch.autograd.grad([*ours], inputs, [dout, weight])
        exact = torch.autograd.grad([*dense], inputs, [dout, weight])
        for name, a, b in zip(("dq", "dk", "dv", "dsink"), got, exact, strict=True):
            torch.testing.assert_close(a, b, msg=lambda m, name=name: f"{name}: {m}")
    assert (out[16:] == 0).all() and meta.lse[16:].isfinite().all()


def test_tuning_arguments_change_nothing() -> None:
    q, k, v = (torch.randn(12, 2, 8) for _ in range(3))
    values = {name: True for name in api.TUNING_ARGUMENTS}
    values |= {"sm_margin": 4, "ref_block_size": (64, 64), "max_seqlen_q": 12}
    out, _ = api.flex_flash_attn_func(q, k, v, **values)
    assert torch.equal(out, api.flex_flash_attn_func(q, k, v)[0])
    torch.testing.assert_close(out, dense_attention(q, k, v, masks.full(12), 8**-0.5)[0])


@pytest.mark.parametrize("seed", range(4))
def test_max_logits_against_dense(seed: int) -> None:
    typed = random_typed(seed, 23)
    mask = masks.from_dense(count_cells(typed, 23, 23) > 0)
    q, k, v, _ = random_qkv(mask, 4, 2, 8, torch.float32, seed)
    codes = torch.tensor([t.to_int_type() for t in typed[2]], dtype=torch.int32)
    _, meta = api.flex_flash_attn_func(
        q, k, v, typed[0].to_tensor(), typed[1].to_tensor(), codes,
        softmax_scale=0.3, sink=torch.full((1, 4), 50.0), return_max_logits=True,
    )  # fmt: skip
    assert meta.max_logits is not None and not meta.max_logits.requires_grad
    wanted = dense_largest(q, k, mask, 0.3)
    torch.testing.assert_close(meta.max_logits.double(), wanted, rtol=1e-5, atol=1e-5)


def test_max_logits_are_refused_beside_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "select_backend", lambda *_: FlexBackend())
    q = torch.zeros(4, 2, 8)
    with pytest.raises(NotImplementedError, match=r"require the kernel 'cuda' .* got 'flex'"):
        api.flex_flash_attn_func(q, q, q, return_max_logits=True)


def test_max_logits_are_refused_below_a_dispatch_mode() -> None:
    q = torch.zeros(4, 2, 8)
    with FlopCounterMode(display=False), pytest.raises(NotImplementedError, match="eager call on"):
        api.flex_flash_attn_func(q, q, q, return_max_logits=True)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"index_attn_indices": torch.zeros(4, 2, 1)}, "got index_attn=False, indices"),
        ({"k_block_size": 8}, r"block sizes \(1, 8\)"),
    ],
)
def test_refused_with_meaning(arguments: dict[str, Any], text: str) -> None:
    q = torch.zeros(4, 2, 8)
    with pytest.raises(NotImplementedError, match=text):
        api.flex_flash_attn_func(q, q, q, **arguments)


@pytest.mark.parametrize("with_sink", [False, True])
def test_softcap_against_dense(with_sink: bool) -> None:
    """In both calls; a sink is a logit and is not capped."""
    key, documents = varlen_key(), torch.tensor([[0, 5], [5, 16]])
    q, k, v, dout = random_qkv(key.plan.mask, 4, 2, 8, torch.float64, 4)
    sink = torch.full((1, 4), 2.0, dtype=torch.float64) if with_sink else None
    want, lse = dense_attention(q, k, v, key.plan.mask, 0.9, 0.7)
    if sink is not None:
        want, lse = with_sinks(want, lse, sink)
    for out, meta in (
        api.calc_attn(q, k, v, key, sink, 0.9, 0.7),
        api.flex_flash_attn_func(
            q, k, v, documents, documents, sink=sink, softmax_scale=0.9, softcap=0.7
        ),
    ):
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(meta.lse, lse)
        for got, x in zip(
            torch.autograd.grad(out, (q, k, v), dout),
            torch.autograd.grad(want, (q, k, v), dout, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(got, x)


def test_calc_attn_refuses_a_sink_per_token() -> None:
    q = torch.zeros(16, 4, 8)
    with pytest.raises(ValueError, match=r"a sink of layout 'sh' must have 2 dimensions"):
        api.calc_attn(q, q[:, :2], q[:, :2], varlen_key(), sink=torch.zeros(16, 1, 4))
