"""The oracle of the attention tests: the definition, densely, in fp64. Written to be read.

Bound on every tensor: our error against fp64 may be 1.5 times the error of the same dense formula
in the input dtype, plus one rounding step at the scale of the summands (a gradient can be exactly
zero, where no relative bound makes sense); inf and nan must sit in the same places.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_magi import AttnMask, AttnSlice
from megatron_magi.core.kernel.attention import flex_flash_attn_func
from megatron_magi.core.mask.slices import BAND_MAX, BAND_MIN

NAMES = ("out", "lse", "dq", "dk", "dv")


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AttnMask, softmax_scale: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """out [T, H, D] and lse [T, H]: softmax over the visible keys, 0 and -inf where none is."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    hidden = ~torch.from_numpy(mask.to_dense()).to(q.device)
    scores = capped(torch.einsum("thd,shd->hts", q, k) * softmax_scale, softcap)
    scores = scores.masked_fill(hidden, -torch.inf)
    empty = hidden.all(1)
    lse = scores.masked_fill(empty[:, None], 0.0).logsumexp(-1)
    lse = lse.masked_fill(lse.isinf(), torch.nan)  # a score of inf, or none but -inf: no softmax
    lse = lse.masked_fill(empty, -torch.inf)
    probs = (scores - lse.masked_fill(empty, 0.0).unsqueeze(-1)).exp()
    return torch.einsum("hts,shd->thd", probs, v), lse.T


def capped(scores: Tensor, softcap: float) -> Tensor:
    """Logits from scaled scores; softcap 0: the scores themselves."""
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def with_sinks(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Dense (out, lse) after sinks, [s, H] or [T, s, H], joined the sums as keys of value 0."""
    sums = lse.exp() + sink.to(lse.dtype).exp().sum(-2)
    return out * (lse.exp() / sums).unsqueeze(-1), sums.log()


def dense_largest(
    q: Tensor, k: Tensor, mask: AttnMask, scale: float, softcap: float = 0.0
) -> Tensor:
    """fp64 [H]: the largest visible logit."""
    if 0 in (*q.shape, *k.shape):
        return torch.full((q.shape[1],), -torch.inf, device=q.device, dtype=torch.float64)
    keys = k.detach().double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = capped(torch.einsum("thd,shd->hts", q.detach().double(), keys) * scale, softcap)
    hidden = ~torch.from_numpy(mask.to_dense()).to(q.device)
    return scores.masked_fill(hidden, -torch.inf).amax((1, 2))


def gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: AttnMask, dtype: torch.dtype,
    softcap: float = 0.0,
) -> dict[str, Tensor]:  # fmt: skip
    """All five tensors of the dense formula computed in ``dtype``."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
    out, lse = dense_attention(q, k, v, mask, q.shape[-1] ** -0.5, softcap)
    grads = torch.autograd.grad(out, (q, k, v), dout.to(dtype), allow_unused=True)
    filled = [
        torch.zeros_like(x) if g is None else g for g, x in zip(grads, (q, k, v), strict=True)
    ]
    return dict(zip(NAMES, (out, lse, *filled), strict=True))


def assert_as_good(
    ours: dict[str, Tensor], exact: dict[str, Tensor], same_dtype: dict[str, Tensor],
    dtype: torch.dtype, scales: dict[str, float],
) -> None:  # fmt: skip
    """The bound above, tensor by tensor."""
    for name, value in ours.items():
        want, got = exact[name], value.double()
        assert torch.equal(got.isnan(), want.isnan()), f"{name}: nan elsewhere"
        assert torch.equal(got.isinf(), want.isinf()), f"{name}: inf elsewhere"
        finite = want.isfinite()
        error = (got - want)[finite].abs().max().item() if finite.any() else 0.0
        peer = (same_dtype[name].double() - want)[finite]
        peer_error = peer[peer.isfinite()].abs().max().item() if finite.any() else 0.0
        # The exact answer is fp64 itself, so fp64 has no peer that errs: a thousand roundings.
        roundings = 1000 if dtype == torch.float64 else 1
        floor = roundings * torch.finfo(dtype).eps * scales[name]
        assert error <= 1.5 * peer_error + floor, f"{name}: {error} > 1.5 * {peer_error} + {floor}"


def assert_as_good_as_dense(
    ours: dict[str, Tensor], inputs: Sequence[Tensor], mask: AttnMask, dtype: torch.dtype,
    softcap: float = 0.0,
) -> None:  # fmt: skip
    """The same against the dense formula of inputs (q, k, v, dout), in fp64 and in ``dtype``."""
    exact = gradients(*inputs, mask, torch.float64, softcap)
    same = exact if dtype == torch.float64 else gradients(*inputs, mask, dtype, softcap)
    assert_as_good(ours, exact, same, dtype, summand_scales(exact, *inputs))


def summand_scales(exact: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict:
    """Largest summand or value of each result, the scale of one rounding step."""
    q, k, v, dout = (x.detach().double().abs().max().item() if x.numel() else 0.0
                     for x in (q, k, v, dout))  # fmt: skip
    score_grad = dout * v
    summands = {"out": v, "lse": 1.0, "dq": score_grad * k, "dk": score_grad * q, "dv": dout}
    values = {n: x[x.isfinite()].abs() for n, x in exact.items()}
    return {n: max(s, values[n].max().item() if values[n].numel() else 0.0)
            for n, s in summands.items()}  # fmt: skip


def random_qkv(
    mask: AttnMask, heads_q: int, heads_kv: int, dim: int | tuple[int, int], dtype: torch.dtype,
    seed: int, device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k, v that require gradients, and dout; ``dim`` of queries and keys, and of values."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (dim, dim) if isinstance(dim, int) else dim

    def draw(tokens: int, heads: int, width: int) -> Tensor:
        return torch.randn(tokens, heads, width, generator=generator).to(device, dtype)

    q, k, v = (draw(*shape).requires_grad_() for shape in (
        (mask.total_seqlen_q, heads_q, keys), (mask.total_seqlen_k, heads_kv, keys),
        (mask.total_seqlen_k, heads_kv, values)))  # fmt: skip
    return q, k, v, draw(mask.total_seqlen_q, heads_q, values)


def compare(
    mask: AttnMask, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, backend: str = "auto",
    softcap: float = 0.0,
) -> None:  # fmt: skip
    """Run our attention forward and backward and hold it to the bound."""
    out, meta = flex_flash_attn_func(q, k, v, slices=mask, backend=backend, softcap=softcap)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    ours = dict(zip(NAMES, (out, meta.lse, *grads), strict=True))
    exact = gradients(q, k, v, dout, mask, torch.float64, softcap)
    same = gradients(q, k, v, dout, mask, q.dtype, softcap)
    assert_as_good(ours, exact, same, q.dtype, summand_scales(exact, q, k, v, dout))


def random_mask(seed: int, num_q: int, num_k: int, max_slices: int = 6) -> AttnMask:
    """Any legal mask: random banded rectangles, those that would share a cell left out."""
    rng = random.Random(seed)
    kept: list[AttnSlice] = []
    for _ in range(rng.randint(0, max_slices)):
        q0, q1 = sorted((rng.randint(0, num_q), rng.randint(0, num_q)))
        k0, k1 = sorted((rng.randint(0, num_k), rng.randint(0, num_k)))
        corners = (k0 - q0, k1 - q1, k0 - q1, k1 - q0)
        d_lo = rng.choice([BAND_MIN, BAND_MIN, k0 - q0, rng.choice(corners) - rng.randint(0, 4)])
        d_hi = rng.choice([BAND_MAX, BAND_MAX, k1 - q1, rng.choice(corners) + rng.randint(0, 4)])
        try:
            AttnMask([*kept, AttnSlice(q0, q1, k0, k1, d_lo, d_hi)], num_q, num_k)
        except ValueError:
            continue
        kept.append(AttnSlice(q0, q1, k0, k1, d_lo, d_hi))
    return AttnMask(kept, num_q, num_k)
