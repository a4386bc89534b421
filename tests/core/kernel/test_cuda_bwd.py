"""The Hopper backward against fp64: named cases, random masks, accumulation, determinism."""

from __future__ import annotations

import copy
import itertools
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_magi import flex_flash_attn_func, masks
from megatron_magi.core.kernel.backend import AttnCall, GradCall
from megatron_magi.core.kernel.reference import ReferenceBackend
from megatron_magi.core.kernel.slice_table import SliceTable, slices_tensor
from megatron_magi.core.mask import AttnMask
from tests.core.kernel.cuda_bwd_cases import (
    CAPPED,
    CASES,
    CORNER,
    IRREGULAR,
    REGULAR,
    Case,
    docs,
    slices_mask,
)
from tests.dense import capped

SUMMAND = 0.1
"""Scale of the terms of a gradient: where they cancel to zero, their rounding is left."""

LSE_STEPS = 2.0**-22
"""Most that a probability is off, relative, per unit of the logit it is recomputed from: two
roundings of fp32 (2^-24 each) of the logit and of lse, in units of log(2), and their difference."""
WIDTHS = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]


def _inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dout on the GPU, seeded by the name."""
    gen = torch.Generator("cuda").manual_seed(zlib.crc32(case.name.encode()))
    heads_q, heads_kv = case.heads

    def make(tokens: int, heads: int, width: int) -> Tensor:
        pad = 1 if case.strided else 0
        wide = torch.randn(tokens, heads + pad, width + 32 * pad, generator=gen, device="cuda")
        return wide.to(case.dtype)[:, pad:, 16 * pad : 16 * pad + width]

    num_q, num_k = case.mask.total_seqlen_q, case.mask.total_seqlen_k
    return (
        case.magnitude * make(num_q, heads_q, case.widths[0]),
        make(num_k, heads_kv, case.widths[0]),
        make(num_k, heads_kv, case.widths[1]),
        make(num_q, heads_q, case.widths[1]),
    )


@dataclass
class Run:
    """One case: what the fp64 reference says, and the arguments of the kernel."""

    case: Case
    inputs: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    """q, k, v, dout; None: drawn."""

    def __post_init__(self) -> None:
        q, k, v, dout = self.inputs or _inputs(self.case)
        self.scale = self.case.scale or self.case.head_dim**-0.5
        table, reference = SliceTable.of(self.case.mask), ReferenceBackend()
        wide = [x.double() for x in (q, k, v, dout)]
        exact = AttnCall(*wide[:3], table, self.scale, softcap=self.case.softcap)
        out, lse = reference.forward(exact)
        delta = (out * wide[3]).sum(-1)
        self.want = reference.backward(exact, GradCall(wide[3], lse, delta))
        self.call = exact._replace(q=q, k=k, v=v)
        self.grad = GradCall(dout, lse.float(), delta.float())
        self.eager = _same_dtype_gradients(self.call, dout, self.case.mask)

    def check(self, grads: tuple[Tensor, Tensor, Tensor]) -> None:
        """At most 1.5x the error of PyTorch in the same dtype plus one rounding step."""
        step = torch.finfo(self.case.dtype).eps
        for name, got, want, eager in zip(
            ("dq", "dk", "dv"), grads, self.want, self.eager, strict=True
        ):
            assert torch.isfinite(got).all(), name
            error = (got.double() - want).abs().max().item() if want.numel() else 0.0
            usual = (eager.double() - want).abs().max().item() if want.numel() else 0.0
            scale = max(want.abs().max().item() if want.numel() else 0.0, SUMMAND)
            assert error <= 1.5 * usual + step * scale, (name, error, usual)


def _same_dtype_gradients(call: AttnCall, dout: Tensor, mask: AttnMask) -> list[Tensor]:
    """Dense attention of PyTorch in the dtype of q."""
    q, k, v = call[:3]
    visible = torch.from_numpy(mask.to_dense()).cuda()
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    repeat = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(repeat, 1) for x in leaves[1:])
    scores = torch.einsum("thd,shd->hts", leaves[0], keys) * call.softmax_scale
    scores = capped(scores, call.softcap)
    hidden = ~visible & visible.any(-1, keepdim=True)
    probs = scores.masked_fill(hidden, float("-inf")).softmax(-1) * visible.to(q.dtype)
    torch.einsum("hts,shd->thd", probs, values).backward(dout)
    return [x.grad for x in leaves]  # type: ignore[misc]


def _poison(grads_of: Case) -> None:
    """Fill the allocator's free memory with NaN, so that unwritten outputs show."""
    for tokens, heads in (
        (grads_of.mask.total_seqlen_q, grads_of.heads[0]),
        *[(grads_of.mask.total_seqlen_k, grads_of.heads[1])] * 2,
    ):
        torch.full((tokens, heads, grads_of.head_dim), float("nan"), device="cuda")


def _backward(run: Run, **options: object) -> tuple[Tensor, Tensor, Tensor]:
    from megatron_magi.core.kernel.hopper.backward import backward

    _poison(run.case)
    return backward(run.call, run.grad._replace(**options))


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_gradients(case: Case, deterministic: bool) -> None:
    run = Run(case)
    run.check(_backward(run, deterministic=deterministic))


@pytest.mark.parametrize("tokens", [1, 8, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_large_logits_cost_what_lse_is_rounded_by(
    widths: tuple[int, int], dtype: torch.dtype, tokens: int
) -> None:
    """With one visible key a probability is 1 and PyTorch's dv exact. The kernel recomputes it as
    exp(score - lse), from a score and an lse that fp32 rounds."""
    case = Case(
        f"one-key-{widths}-{dtype}-{tokens}", masks.sliding_window(tokens, (0, 0)), (4, 4),
        *widths, dtype, magnitude=1000.0,
    )  # fmt: skip
    run = Run(case)
    logits = run.grad.lse.abs().max().item()
    assert tokens == 1 or logits > 1000
    largest = run.want[2].abs().max().item()
    error = (_backward(run)[2].double() - run.want[2]).abs().max().item()
    assert error <= (torch.finfo(dtype).eps + LSE_STEPS * logits) * max(largest, SUMMAND)


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("case", REGULAR + IRREGULAR + CORNER + CAPPED, ids=lambda c: c.name)
def test_gradients_in_the_dtype_of_q_are_the_rounded_sums(case: Case, deterministic: bool) -> None:
    run = Run(case)
    sums = _backward(run, deterministic=deterministic)
    grads = _backward(run, deterministic=deterministic, dtype=case.dtype)
    assert all(x.dtype == case.dtype and x.is_contiguous() for x in grads)
    run.check(grads)
    # In the fast mode dq is added up in another order each time; dk and dv never are.
    for rounded, exact in list(zip(grads, sums, strict=True))[0 if deterministic else 1 :]:
        assert torch.equal(rounded, exact.to(case.dtype))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("heads", [(4, 2), (64, 4)], ids=["whole groups", "split groups"])
def test_gradients_are_written_where_they_are_wanted(
    heads: tuple[int, int], dtype: torch.dtype | None
) -> None:
    """Side by side, as they travel; equal bits, and nothing beside them is touched."""
    run = Run(Case("placed", masks.causal(1000), heads=heads))
    _, dk, dv = _backward(run, dtype=dtype)
    buffer = torch.full((1000, 3, *dk.shape[1:]), 7.0, dtype=dk.dtype, device="cuda")
    placed = _backward(run, dtype=dtype, dkv=(buffer[:, 0], buffer[:, 2]))
    assert placed[1].data_ptr() == buffer.data_ptr()
    assert torch.equal(placed[1], dk) and torch.equal(placed[2], dv)
    assert (buffer[:, 1] == 7).all()
    with pytest.raises(ValueError, match=r"dv must be written to .* with 16-byte aligned rows"):
        _backward(run, dtype=dtype, dkv=(dk, dv.transpose(0, 1).contiguous().transpose(0, 1)[:-1]))


@pytest.mark.parametrize("case", REGULAR + IRREGULAR + CORNER + CAPPED, ids=lambda c: c.name)
def test_delta_may_be_left_to_the_kernel(case: Case) -> None:
    """Made from out on the way: the bits of the separate kernel."""
    from megatron_magi.core.kernel.hopper import HopperBackend
    from megatron_magi.core.kernel.hopper.backward import kernel_delta

    run = Run(case)
    out, _ = HopperBackend(run.call.q.device, case.dtype).forward(run.call)
    if out.numel() == 0:
        return
    given = _backward(run, delta=kernel_delta(out, run.grad.dout), deterministic=True)
    made = _backward(run, delta=None, out=out, deterministic=True)
    assert all(map(torch.equal, given, made))
    for wrong in ({"delta": None}, {"out": out}):
        with pytest.raises(ValueError, match="either delta or out is required"):
            _backward(run, **wrong)


@pytest.mark.parametrize("case", REGULAR + IRREGULAR + CAPPED, ids=lambda c: c.name)
def test_two_deterministic_runs_have_equal_bits(case: Case) -> None:
    run = Run(case)
    first = _backward(run, deterministic=True)
    for _ in range(3):
        again = _backward(run, deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "mask",
    [masks.sliding_window(3000, (300, 0)), docs(77, 63, 860, 33, 1500)],
    ids=["window", "documents"],
)
def test_a_head_alone_gets_the_bits_that_it_gets_among_others(
    mask: AttnMask, head_dim: int
) -> None:
    """The order of additions depends on the mask alone. Steps share row groups here, and at
    head_dim 64 two warps add them in turns."""
    run = Run(Case("alone", mask, heads=(3, 3), head_dim=head_dim))
    together = _backward(run, deterministic=True)
    assert run.grad.delta is not None
    for head in range(3):
        one = slice(head, head + 1)
        q, k, v, dout = (x[:, one] for x in (*run.call[:3], run.grad.dout))
        alone = copy.copy(run)
        alone.call = run.call._replace(q=q, k=k, v=v)
        alone.grad = run.grad._replace(
            dout=dout, lse=run.grad.lse[:, one], delta=run.grad.delta[:, one]
        )
        for got, want in zip(_backward(alone, deterministic=True), together, strict=True):
            assert torch.equal(got, want[:, one])


@pytest.mark.parametrize("head_dim", [96, 128, 256])
def test_accumulates_into_dq_in_place(head_dim: int) -> None:
    run = Run(Case("accumulate", docs(100, 400), head_dim=head_dim))
    for grad_dtype in (None, torch.bfloat16):
        dq_acc = torch.randn(500, 4, head_dim, device="cuda")
        before = dq_acc.clone()
        dq, dk, dv = _backward(run, dq=dq_acc, dtype=grad_dtype)
        assert dq is dq_acc and dk.dtype == (grad_dtype or torch.float32)
        run.check((dq - before, dk, dv))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [96, 128, 256])
def test_scores_in_the_hundreds_of_millions(head_dim: int, dtype: torch.dtype) -> None:
    """lse / softmax_scale reaches 8e8: in fp16 only its split into three parts has that range."""
    run = Run(Case("large", docs(200, 130), head_dim=head_dim, dtype=dtype, scale=1e-6))
    from megatron_magi.core.kernel.hopper.backward import backward

    (q, k, v, table, scale), dout = run.call[:5], run.grad.dout
    call = AttnCall(4000 * q, 4000 * k, v, table, scale)
    exact, reference = AttnCall(*(x.double() for x in call[:3]), table, scale), ReferenceBackend()
    out, lse = reference.forward(exact)
    assert lse.max() / scale > 4e8
    delta = (out * dout.double()).sum(-1)
    want = reference.backward(exact, GradCall(dout.double(), lse, delta))
    got = backward(call, GradCall(dout, lse.float(), delta.float()))
    for name, x, y in zip(("dq", "dk", "dv"), got, want, strict=True):
        assert (x.double() - y).norm() < 0.02 * y.norm(), name


@pytest.mark.parametrize("delta", [float("inf"), float("nan")])
def test_rows_that_see_nothing_may_have_any_delta(delta: float) -> None:
    """A gradient of their lse is infinite, for one."""
    run = Run(CORNER[3])
    blind = run.grad.lse == -torch.inf
    assert blind.any() and run.grad.delta is not None
    run.grad.delta[blind] = delta
    run.check(_backward(run))


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_the_op_with_gradients_of_out_and_lse(out_dtype: torch.dtype) -> None:
    """Eager calls and the dispatched op, out in either dtype, inputs that are views."""
    mask = docs(100, 29, 400)
    q, k, v, dout = _inputs(Case("op", mask, strided=True))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def gradients(
        function: Callable[..., tuple[Tensor, Tensor]], qkv: list[Tensor]
    ) -> list[Tensor]:
        out, lse = function(*qkv)
        return list(torch.autograd.grad((out.float() * dout).sum() + lse.sum(), leaves))

    def eager(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, meta = flex_flash_attn_func(q, k, v, slices=mask, out_dtype=out_dtype)
        return out, meta.lse

    def dispatched(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        args = slices_tensor(mask), 128**-0.5, out_dtype, "cuda", False
        return torch.ops.magi.attn_fwd(q, k, v, *args)

    def reference(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, meta = flex_flash_attn_func(q, k, v, slices=mask, backend="reference")
        return out, meta.lse

    want = gradients(reference, [x.double() for x in leaves])
    for function in (eager, dispatched):
        for got, exact in zip(gradients(function, leaves), want, strict=True):
            assert got.dtype == torch.bfloat16
            assert (got.double() - exact.double()).norm() < 0.01 * exact.double().norm()


@pytest.mark.parametrize("spoiled", ["q", "k", "v", "dout", "lse", "delta"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("head_dim", [96, 128, 256])
def test_non_finite_inputs_spoil_what_they_spoil_in_the_reference(
    head_dim: int, spoiled: str, value: float
) -> None:
    run = Run(Case("spoiled", masks.full(192, 256), heads=(2, 1), head_dim=head_dim))
    from megatron_magi.core.kernel.hopper.backward import backward

    asked = run.call if spoiled in run.call._fields else run.grad
    x = getattr(asked, spoiled)
    x[(70, 0, 5)[: x.dim()]] = value
    (q, k, v, table, scale), grad = run.call[:5], run.grad
    exact = AttnCall(q.double(), k.double(), v.double(), table, scale)
    given = (x.double() for x in (grad.dout, grad.lse, grad.delta))
    want = ReferenceBackend().backward(exact, GradCall(*given))
    got = backward(run.call, grad)
    for name, x, y in zip(("dq", "dk", "dv"), got, want, strict=True):
        assert torch.equal(torch.isfinite(x), torch.isfinite(y)), name


@pytest.mark.parametrize("block", range(20))
def test_random_masks(block: int) -> None:
    """2,000 masks by seed, both modes in turn."""
    for seed in range(100 * block, 100 * block + 100):
        case = random_case(seed)
        run = Run(case)
        try:
            grad_dtype = case.dtype if seed // 2 % 2 else None
            run.check(_backward(run, deterministic=bool(seed % 2), dtype=grad_dtype))
        except AssertionError as error:
            raise AssertionError(f"{case}: {case.mask.slices.tolist()}") from error


def random_case(seed: int) -> Case:
    """Disjoint bands on a random grid, random heads, head_dim and dtype."""
    rng = np.random.default_rng(seed)
    num_q, num_k = (int(x) for x in rng.integers(1, 600, 2))
    cuts_q, cuts_k = (
        np.unique([0, n, *rng.integers(0, n + 1, rng.integers(0, 5))]) for n in (num_q, num_k)
    )
    rows = []
    for q0, q1 in itertools.pairwise(cuts_q):
        for k0, k1 in itertools.pairwise(cuts_k):
            low, high = int(k0 - (q1 - 1)), int(k1 - 1 - q0)
            a, b = sorted(int(x) for x in rng.integers(low, high + 1, 2))
            kind = rng.integers(0, 4)
            if kind == 1:
                rows.append((q0, q1, k0, k1, low, high))
            elif kind == 2:
                rows.append((q0, q1, k0, k1, a, b))
            elif kind == 3:
                rows += [(q0, q1, k0, k1, low, a), (q0, q1, k0, k1, a + 1, high)]
    heads_kv = int(rng.choice([1, 2, 3]))
    return Case(
        f"random-{seed}",
        slices_mask(rows, num_q, num_k),
        heads=(heads_kv * int(rng.choice([1, 2, 4])), heads_kv),
        **dict(zip(("head_dim", "value_dim"), WIDTHS[rng.integers(len(WIDTHS))], strict=True)),
        dtype=[torch.bfloat16, torch.float16][int(rng.integers(2))],
        softcap=float(rng.choice([0.0, 0.0, 0.0, 2.0])),
    )


@pytest.mark.parametrize("case", [*REGULAR[1:4], *REGULAR[5:7], IRREGULAR[4]], ids=lambda c: c.name)
def test_row_delta(case: Case) -> None:
    from megatron_magi.core.kernel.hopper.backward import kernel_delta

    dout = _inputs(case)[3]
    out = dout.flip(0).clone()
    want = (out.double() * dout.double()).sum(-1)
    torch.testing.assert_close(kernel_delta(out, dout).double(), want, atol=1e-4, rtol=1e-5)
