"""Attention with sinks against dense fp64: masks, numbers of sinks, dtypes, and every kernel."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from megatron_magi import AttnMask, flex_flash_attn_func, masks
from megatron_magi.core.kernel.backend import AttnCall
from megatron_magi.core.kernel.reference import ReferenceBackend
from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.core.kernel.torch_flex import FlexBackend
from tests.dense import (
    NAMES,
    assert_as_good,
    dense_attention,
    dense_largest,
    random_mask,
    random_qkv,
    summand_scales,
    with_sinks,
)

MASKS = {
    "causal": masks.causal(150),
    "packed": masks.from_cu_seqlens([0, 5, 70, 71, 150]),
    "window": masks.sliding_window(150, (30, 0)),
    "pad rows": masks.from_cu_seqlens([0, 60, 110], total_seqlen=150),
    "nothing": AttnMask([], 150, 40),
}
SHAPES = [(1, 4), (8, 4), (150, 1, 4), (150, 3, 4)]
ALL_NAMES = (*NAMES, "dsink")
CASES = {
    "reference": ("cpu", (torch.float64, torch.float32, torch.bfloat16, torch.float16)),
    "flex": ("cuda", (torch.bfloat16,)),  # its own sums in fp32 may exceed the bound by 6 %
    "cuda": ("cuda", (torch.bfloat16, torch.float16)),
}


@pytest.fixture(params=[
    "reference", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("flex", "cuda")),
])  # fmt: skip
def kernel(request: pytest.FixtureRequest) -> str:
    if request.param != "reference" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if request.param == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    return str(request.param)


def dense(
    inputs: list[Tensor], grads: tuple[Tensor, Tensor], mask: AttnMask, dtype: torch.dtype,
    softcap: float = 0.0,
) -> dict[str, Tensor]:  # fmt: skip
    """All six tensors by the definition in ``dtype``; ``grads``: of out and lse."""
    q, k, v, sink = leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    out, lse = with_sinks(*dense_attention(q, k, v, mask, q.shape[-1] ** -0.5, softcap), sink)
    given = [x.to(dtype) for x in grads]
    found = torch.autograd.grad([out, lse], leaves, given, allow_unused=True)
    made = (torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True))
    return dict(zip(ALL_NAMES, (out.detach(), lse.detach(), *made), strict=True))


def check(
    mask: AttnMask, inputs: list[Tensor], grads: tuple[Tensor, Tensor], kernel: str,
    softcap: float = 0.0, deterministic: bool = False,
) -> None:  # fmt: skip
    q, k, v, sink = inputs
    out, meta = flex_flash_attn_func(
        q, k, v, slices=mask, backend=kernel, softcap=softcap, sink=sink,
        deterministic=deterministic,
    )  # fmt: skip
    found = torch.autograd.grad([out, meta.lse], inputs, [*grads])
    ours = dict(zip(ALL_NAMES, (out.detach(), meta.lse.detach(), *found), strict=True))
    exact = dense(inputs, grads, mask, torch.float64, softcap)
    same = dense(inputs, grads, mask, q.dtype, softcap)
    scales = summand_scales(exact, q, k, v, grads[0])
    # A row's share is rounded as out is in delta; the errors of shared sinks' rows add up.
    share = (exact["out"] * grads[0].double()).norm(dim=-1).max()
    share = share * len(q) ** 0.5 if sink.ndim == 2 else share
    scales["dsink"] = max(share.item(), exact["dsink"].abs().max().item())
    for name in ("dq", "dk"):  # the gradient of lse is among their summands
        scales[name] += grads[1].abs().max().item() * max(q.abs().max().item(), 1.0)
    assert_as_good(ours, exact, same, q.dtype, scales)


def drawn(
    mask: AttnMask, shape: tuple[int, ...], dtype: torch.dtype, device: str, width: int = 64
) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """q, k, v and sinks, and gradients of out and lse."""
    *qkv, dout = random_qkv(mask, 4, 2, width, dtype, 3, device)
    generator = torch.Generator().manual_seed(sum(shape))
    sink = torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    dlse = torch.randn(dout.shape[:2], generator=generator).to(device, acc)
    return [*qkv, sink], (dout, dlse)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_against_dense(name: str, shape: tuple[int, ...], kernel: str) -> None:
    """The first dtype with and without a cap of the logits, the others with either."""
    device, dtypes = CASES[kernel]
    caps = itertools.cycle((0.0, 0.7))
    for dtype, softcap in [(dtypes[0], 0.7), *zip(dtypes, caps, strict=False)]:
        check(MASKS[name], *drawn(MASKS[name], shape, dtype, device), kernel, softcap)


@pytest.mark.parametrize("width", [64, 96, 128, 256, 80])
@pytest.mark.parametrize("deterministic", [False, True])
def test_widths_of_heads(width: int, deterministic: bool, kernel: str) -> None:
    device, dtypes = CASES[kernel]
    mask = MASKS["packed"]
    given = drawn(mask, (2, 4), dtypes[-1], device, width)
    check(mask, *given, kernel, deterministic=deterministic)


@pytest.mark.parametrize("seed", range(12))
def test_random_masks(seed: int, kernel: str) -> None:
    device, dtypes = CASES[kernel]
    mask = random_mask(seed, 90, 70)
    check(mask, *drawn(mask, (90, 2, 4) if seed % 2 else (3, 4), dtypes[0], device), kernel)


def test_the_largest_logits_leave_sinks_out(kernel: str) -> None:
    if kernel == "flex":
        pytest.skip("does not keep them")
    device, dtypes = CASES[kernel]
    mask = MASKS["pad rows"]
    (q, k, v, sink), _ = drawn(mask, (2, 4), dtypes[0], device)
    asked = {"slices": mask, "backend": kernel, "return_max_logits": True}
    _, meta = flex_flash_attn_func(q, k, v, sink=sink + 50.0, **asked)
    assert meta.max_logits is not None
    wanted = dense_largest(q, k, mask, 64**-0.5)
    torch.testing.assert_close(meta.max_logits.double(), wanted, rtol=1e-5, atol=1e-5)


def test_a_row_that_sees_nothing_has_the_sinks_alone(kernel: str) -> None:
    device, dtypes = CASES[kernel]
    mask = MASKS["pad rows"]
    (q, k, v, sink), _ = drawn(mask, (150, 2, 4), dtypes[0], device)
    out, meta = flex_flash_attn_func(q, k, v, slices=mask, backend=kernel, sink=sink)
    assert (out[110:] == 0).all()
    alone = sink.to(meta.lse.dtype).logsumexp(1)
    torch.testing.assert_close(meta.lse[110:], alone[110:], rtol=1e-6, atol=1e-6)
    dv, dsink = torch.autograd.grad(out.sum(), (v, sink))
    assert (dsink[110:] == 0).all() and (dsink[:110] != 0).any() and dv.isfinite().all()


def test_two_backwards_give_equal_bits_of_the_sinks_gradient(kernel: str) -> None:
    device, dtypes = CASES[kernel]
    mask = MASKS["causal"]
    (q, k, v, sink), (dout, _) = drawn(mask, (3, 4), dtypes[0], device)

    def gradient() -> Tensor:
        out, _ = flex_flash_attn_func(
            q, k, v, slices=mask, backend=kernel, sink=sink, deterministic=True
        )
        return torch.autograd.grad(out, sink, dout)[0]

    assert torch.equal(gradient(), gradient())


@pytest.mark.parametrize("shape", [(3, 4), (150, 1, 4)], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("name", MASKS)
def test_flex_is_the_reference(name: str, softcap: float, shape: tuple[int, ...]) -> None:
    """Its forward; FlexAttention has no backward on the CPU."""
    mask = MASKS[name]
    (q, k, v, sink), _ = drawn(mask, shape, torch.float32, "cpu")
    table = SliceTable(mask.slices, 150, mask.total_seqlen_k)
    q, k, v = (x.detach() for x in (q, k, v))
    call = AttnCall(q, k, v, table, 0.2, softcap=softcap, sink_lse=sink.detach().logsumexp(-2))
    want, got = ReferenceBackend().forward(call), FlexBackend().forward(call)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", [ReferenceBackend(), FlexBackend()], ids=lambda x: x.name)
def test_the_first_of_two_results_has_the_sinks(backend: ReferenceBackend) -> None:
    """Keys in two calls: the first joins all rows, also those that see their keys in the second."""
    mask = MASKS["pad rows"]
    (q, k, v, sink), _ = drawn(mask, (2, 4), torch.float32, "cpu")
    q, k, v, sink_lse = (x.detach() for x in (q, k, v, sink.logsumexp(0)))
    whole = SliceTable(mask.slices, 150, 150)
    want = backend.forward(AttnCall(q, k, v, whole, 0.2, sink_lse=sink_lse))
    first, second = (SliceTable(mask.slices[i : i + 1], 150, 150) for i in range(2))
    made = backend.forward(AttnCall(q, k, v, first, 0.2, sink_lse=sink_lse))
    got = backend.forward(AttnCall(q, k, v, second, 0.2), prev=made)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="sinks join the first of several"):
        backend.forward(AttnCall(q, k, v, second, 0.2, sink_lse=sink_lse), prev=made)


@pytest.mark.parametrize("needs", ["sink", "qkv", "both", "none"])
def test_gradients_that_nobody_needs(needs: str) -> None:
    mask = MASKS["packed"]
    given, (dout, dlse) = drawn(mask, (2, 4), torch.float64, "cpu")
    exact = dense(given, (dout, dlse), mask, torch.float64)
    wanted = {"sink": [3], "qkv": [0, 1, 2], "both": [0, 1, 2, 3], "none": []}[needs]
    leaves = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(given)]
    out, meta = flex_flash_attn_func(*leaves[:3], slices=mask, sink=leaves[3])
    assert out.requires_grad == (needs != "none")
    if needs != "none":
        found = torch.autograd.grad([out, meta.lse], [leaves[i] for i in wanted], [dout, dlse])
        for i, got in zip(wanted, found, strict=True):
            torch.testing.assert_close(got, exact[ALL_NAMES[2 + i]])


@pytest.mark.parametrize("layout", ["sh", "ssh"])
def test_in_one_graph_of_torch_compile(layout: str) -> None:
    mask = MASKS["packed"]
    shape = (2, 4) if layout == "sh" else (150, 2, 4)
    given, grads = drawn(mask, shape, torch.float64, "cpu", 16)

    def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
        out, meta = flex_flash_attn_func(q, k, v, slices=slices, sink=sink * 2.0)
        return out.sin(), meta.lse

    slices = torch.from_numpy(mask.slices.copy())
    results = []
    for run in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        made = run(*given)
        results.append((*made, *torch.autograd.grad([*made], given, [*grads])))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
