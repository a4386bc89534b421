"""The fused QKV split and RoPE against fp64, and what it refuses. Interpreted on the CPU."""

from types import SimpleNamespace

import pytest
import torch

from tests.adapter.interpreter import DEVICE  # isort: skip

import megatron_magi.adapter  # noqa: F401
from megatron_magi.adapter.fused.qkv_rope import (
    FusedSelfAttention,
    check_fits,
    split_and_rotate,
)
from tests.adapter.fused.exactness import DTYPES, ROUNDING, worst


def exact_rope(mixed, angles, groups, head_dim):
    """Split and rotate-half RoPE as others write it, in the dtype of `mixed`."""
    rows, batch, width = mixed.shape
    per_group = width // head_dim // groups - 2
    q, k, v = mixed.view(rows, batch, groups, -1).split(
        [per_group * head_dim, head_dim, head_dim], dim=3
    )
    cos, sin = (f(angles.to(torch.float64)).to(mixed.dtype) for f in (torch.cos, torch.sin))

    def rotate(x):
        low, high = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-high, low], dim=-1) * sin

    return rotate(q.reshape(rows, batch, -1, head_dim)), rotate(k), v


@DTYPES
@pytest.mark.parametrize(
    "rows, batch, groups, per_group, head_dim",
    [(5, 1, 2, 3, 8), (40, 2, 1, 4, 12), (33, 1, 3, 1, 64), (70, 1, 2, 4, 128)],
)
def test_split_and_rotate(dtype, rows, batch, groups, per_group, head_dim):
    torch.manual_seed(rows)
    mixed = torch.randn(rows, batch, groups * (per_group + 2) * head_dim, device=DEVICE).to(dtype)
    half = torch.randint(0, 300_000, (rows, 1), device=DEVICE) * torch.rand(1, head_dim // 2).to(
        DEVICE
    )
    angles = torch.cat([half, half], dim=-1)[:, None, None]

    torch.manual_seed(1)
    weights = [torch.randn(rows, batch, h, head_dim, device=DEVICE).to(dtype)
               for h in (groups * per_group, groups, groups)]  # fmt: skip

    def results_of(function, values):
        leaf = values.clone().requires_grad_()
        results = function(leaf, angles, groups, head_dim)
        sum((x * w.to(x.dtype)).sum() for x, w in zip(results, weights, strict=True)).backward()
        return [*(x.detach() for x in results), leaf.grad]

    exact = results_of(exact_rope, mixed.double())
    plain = results_of(exact_rope, mixed)
    fused = results_of(split_and_rotate, mixed)
    for got, other, want in zip(fused, plain, exact, strict=True):
        assert got.shape == want.shape and got.dtype == dtype and got.is_contiguous()
        # Sine and cosine of large fp32 angles differ in their last bits.
        step = max(ROUNDING[dtype], 2.0**-20) * float(want.abs().max())
        assert worst(got, want) <= 1.5 * worst(other, want) + step


def test_split_and_rotate_refuses_partial_rotary_dimensions():
    with pytest.raises(ValueError, match="rotary_percent must be 1"):
        split_and_rotate(
            torch.zeros(4, 1, 48, device=DEVICE), torch.zeros(4, 1, 1, 8, device=DEVICE), 1, 16
        )


def test_split_and_rotate_refuses_angles_of_each_sequence():
    """As Megatron's multimodal positions are; the kernel reads one angle for all sequences."""
    with pytest.raises(ValueError, match="share their positions"):
        split_and_rotate(
            torch.zeros(4, 2, 48, device=DEVICE), torch.zeros(4, 2, 1, 16, device=DEVICE), 1, 16
        )


def test_a_second_derivative_is_refused():
    """Beside other terms it would be left out of the sum without an error."""
    x = torch.randn(3, 1, 24, device=DEVICE, requires_grad=True)
    q, _, _ = split_and_rotate(x * 1, torch.ones(3, 1, 1, 8, device=DEVICE), 1, 8)
    (grad,) = torch.autograd.grad(q.sin().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        torch.autograd.grad(grad.square().sum() + x.square().sum(), x)


def config(**changes):
    plain = {"qk_layernorm": False, "rotary_interleaved": False, "attention_output_gate": False}
    sizes = {"num_query_groups": 4, "tensor_model_parallel_size": 2}
    return SimpleNamespace(**{**plain, **sizes, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"qk_layernorm": True},
        {"rotary_interleaved": True},
        {"attention_output_gate": True},
        {"num_query_groups": 3},
        {"no_rope_freq": [0, 0, 0, 1]},
        {"yarn_rotary_scaling_factor": 4.0},
    ],
    ids=str,
)
def test_an_attention_that_does_more_is_refused(changes):
    check_fits(config())
    check_fits(config(no_rope_freq=[0, 0]))
    with pytest.raises(NotImplementedError, match=next(iter(changes))) as error:
        check_fits(config(**changes))
    assert "set model.fused=off" in str(error.value)


def test_a_packed_batch_of_megatrons_is_refused():
    """Its angles are one sequence's; another sequence would go on where the one before ended."""
    from megatron.core.packed_seq_params import PackedSeqParams

    attention = FusedSelfAttention.__new__(FusedSelfAttention)
    packed = PackedSeqParams(qkv_format="thd")
    with pytest.raises(NotImplementedError, match="'thd'"):
        attention.forward(torch.zeros(4, 1, 8), None, packed_seq_params=packed)
