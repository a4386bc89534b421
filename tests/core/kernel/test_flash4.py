"""FlashAttention-4 as a backend: on the CPU its lists and its test of a cell, with kernels that are
the dense formula (flash4_on_cpu.py); on a GPU the package itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_magi import masks
from megatron_magi.core.kernel import flash4
from megatron_magi.core.kernel.backend import AttnCall, GradCall
from megatron_magi.core.kernel.flash4 import Flash4Backend
from megatron_magi.core.kernel.merge import merge_
from megatron_magi.core.kernel.reference import ReferenceBackend
from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.core.mask import AttnMask
from tests.core.kernel import flash4_on_cpu
from tests.core.kernel.test_key_splitting import two_halves
from tests.core.kernel.test_torch_flex import MASKS
from tests.dense import NAMES, assert_as_good_as_dense, dense_attention, random_mask, random_qkv

BF16 = torch.bfloat16
LONG = {
    "long-causal": masks.causal(700),
    "long-documents": masks.from_cu_seqlens([0, 256, 300, 641, 900]),
    "long-window": masks.sliding_window(900, (200, 0)),
    "long-full": masks.full(520, 1000),
}
ALL = {**MASKS, **LONG, "two-halves": two_halves()}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "cpu":
        flash4_on_cpu.install(monkeypatch)
    elif not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    else:
        pytest.importorskip(flash4.MODULE)
    yield request.param


def check(
    mask: AttnMask, device: str, softcap: float = 0.0, dim: int = 64, dtype: torch.dtype = BF16
) -> None:
    """Forward and backward of one call against fp64."""
    q, k, v, dout = random_qkv(mask, 4, 2, dim, dtype, 0, device)
    leaves = q.detach(), k.detach(), v.detach()
    call = AttnCall(*leaves, SliceTable.of(mask), dim**-0.5, softcap=softcap)
    out, lse = Flash4Backend().forward(call)
    grads = Flash4Backend().backward(call, GradCall(dout, lse, out=out, dtype=dtype))
    ours = dict(zip(NAMES, (out, lse, *grads), strict=True))
    assert_as_good_as_dense(ours, (q, k, v, dout), mask, dtype, softcap)


@pytest.mark.parametrize("name", ALL)
def test_masks(name: str, device: str) -> None:
    check(ALL[name], device)


@pytest.mark.parametrize("seed", range(6))
def test_random_masks(seed: int, device: str) -> None:
    check(random_mask(seed, 330, 410), device, dim=(32, 64, 128)[seed % 3])


def test_softcap_and_fp16(device: str) -> None:
    check(LONG["long-causal"], device, softcap=2.0)
    check(LONG["long-documents"], device, dtype=torch.float16)


@pytest.mark.parametrize("name", ["two-slices-a-row", "33-slices-a-row", "holes"])
def test_a_stage_of_several(name: str, device: str) -> None:
    """Merged into what came before; in backward the other stage has moved lse and delta."""
    mask = ALL[name]
    q, k, v, dout = (x.detach() for x in random_qkv(mask, 4, 2, 64, BF16, 1, device))
    call = AttnCall(q, k, v, SliceTable.of(mask), 0.2)
    want = ReferenceBackend().forward(call, out_dtype=torch.float32)
    earlier = torch.randn_like(want[0]), torch.zeros_like(want[1])
    got = earlier[0].clone(), earlier[1].clone()
    assert Flash4Backend().forward(call, prev=got) is got
    merge_(*earlier, *want)
    torch.testing.assert_close(got, earlier, atol=2e-2, rtol=2e-2)
    out, lse = earlier
    delta = (out * dout).sum(-1)
    wanted = ReferenceBackend().backward(call, GradCall(dout, lse, delta))
    before = torch.randn_like(wanted[0])
    dq = before.clone()
    found, *dkv = Flash4Backend().backward(call, GradCall(dout, lse, delta, dq=dq))
    assert found is dq and dkv[0].dtype == torch.float32
    for x, expected in zip((dq - before, *dkv), wanted, strict=True):
        torch.testing.assert_close(x, expected, atol=5e-2, rtol=5e-2)


def test_other_rows_stay(device: str) -> None:
    mask = two_halves()
    q, k, v, _ = (x.detach() for x in random_qkv(mask, 4, 2, 64, BF16, 1, device))
    into = torch.ones_like(q), torch.ones(q.shape[:2], device=device)
    assert Flash4Backend().forward(AttnCall(q, k, v, SliceTable.of(mask), 0.2), into=into) is into
    want, _ = dense_attention(q.double(), k.double(), v.double(), mask, 0.2)
    torch.testing.assert_close(into[0][:80].double(), want[:80], atol=2e-2, rtol=2e-2)
    assert (into[0][80:90] == 1).all() and (into[1][130:] == 1).all()


@pytest.mark.parametrize("value", [float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["causal", "33-slices-a-row"])
def test_a_row_of_infinite_scores_is_nan(name: str, value: float, device: str) -> None:
    """In one part or several; a row that sees nothing stays 0."""
    mask = ALL[name]
    q, k, v, _ = (x.detach() for x in random_qkv(mask, 4, 2, 64, BF16, 3, device))
    k[..., 7] = k[..., 7].abs() + 1
    q[::9, 1, 7] = value
    call = AttnCall(q, k, v, SliceTable.of(mask), 0.125)
    (out, lse), (want, want_lse) = Flash4Backend().forward(call), ReferenceBackend().forward(call)
    assert torch.equal(out.isnan(), want.isnan()) and want.isnan().any()
    assert torch.equal(lse.isnan(), want_lse.isnan())
    assert torch.equal(lse.isneginf(), want_lse.isneginf())


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"dim": 136}, r"multiples of 8 up to 128.*\(136, 136\); use 'flex'"),
        ({"dim": 20}, "multiples of 8"),
        ({"dtype": torch.float32}, "takes bf16 and fp16.*float32"),
        ({"max_logits": torch.zeros(4)}, "largest logits require the kernel 'cuda'"),
    ],
)
def test_what_it_does_not_take(changes: dict, text: str) -> None:
    dim, dtype = changes.pop("dim", 64), changes.pop("dtype", BF16)
    q, k, v, _ = (x.detach() for x in random_qkv(masks.causal(8), 4, 2, dim, dtype, 0))
    call = AttnCall(q, k, v, SliceTable.of(masks.causal(8)), 1.0, **changes)
    with pytest.raises(NotImplementedError, match=text):
        Flash4Backend().forward(call)


def test_deterministic_gradients_are_flex_attentions(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention takes CUDA tensors alone, so the reference stands for it."""
    monkeypatch.setattr(flash4, "FlexBackend", ReferenceBackend)
    q, k, v, dout = (x.detach() for x in random_qkv(masks.causal(8), 4, 2, 64, BF16, 0))
    call = AttnCall(q, k, v, SliceTable.of(masks.causal(8)), 1.0)
    grad = GradCall(dout, torch.zeros(8, 4), torch.zeros(8, 4), deterministic=True)
    got, expected = Flash4Backend().backward(call, grad), ReferenceBackend().backward(call, grad)
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
