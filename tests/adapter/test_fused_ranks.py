"""Cross entropy over two vocabulary-parallel ranks, and what the fused attention refuses."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import tests.adapter.interpreter  # noqa: F401  # isort: skip

import megatron_magi.adapter  # noqa: F401
from megatron_magi.adapter.fused.cross_entropy import cross_entropy
from megatron_magi.adapter.fused.norm import FusedRMSNorm
from megatron_magi.adapter.fused.parts import FusedParts
from megatron_magi.adapter.fused.qkv_rope import FusedSelfAttention, check_fits
from megatron_magi.adapter.fused.swiglu import SwiGLU
from megatron_magi.adapter.layer_spec import with_fused_parts
from tests.process_pool import ProcessPool

WIDTH = 50


def case():
    """Logits of 2 * WIDTH words, labels at every part's edges, a weight that is 0."""
    torch.manual_seed(3)
    logits = 4 * torch.randn(4, 2, 2 * WIDTH)
    logits[0, 0, 3], logits[0, 1, WIDTH + 7] = 90.0, 90.0
    labels = torch.tensor([[0, WIDTH - 1], [WIDTH, 2 * WIDTH - 1], [3, 77], [9, 60]])
    weights = torch.rand(4, 2)
    weights[2, 0] = 0
    return logits, labels, weights


def losses_of_rank(rank):
    logits, labels, weights = case()
    own = logits[..., rank * WIDTH : (rank + 1) * WIDTH].contiguous().requires_grad_()
    losses = cross_entropy(own * 1.0, labels, dist.group.WORLD)
    (losses * weights).sum().backward()
    return losses.detach().numpy(), own.grad.numpy()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the pool's processes are on the CPU")
def test_two_ranks_have_the_losses_and_gradients_of_one():
    logits, labels, weights = case()
    whole = logits.double().requires_grad_()
    exact = torch.nn.functional.cross_entropy(
        whole.flatten(0, 1), labels.flatten(), reduction="none"
    ).view(labels.shape)
    (exact * weights).sum().backward()
    pool = ProcessPool(2)
    try:
        ranks = pool.run(losses_of_rank)
    finally:
        pool.stop()
    for losses, _ in ranks:
        assert torch.allclose(torch.from_numpy(losses).double(), exact, rtol=1e-6, atol=1e-5)
    got = torch.cat([torch.from_numpy(grad) for _, grad in ranks], dim=-1)
    assert torch.allclose(got.double(), whole.grad, rtol=1e-5, atol=1e-6)


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
    ],
    ids=str,
)
def test_an_attention_that_does_more_is_refused(changes):
    check_fits(config())
    with pytest.raises(NotImplementedError, match=next(iter(changes))) as error:
        check_fits(config(**changes))
    assert "set model.fused=off" in str(error.value)


def test_only_megatrons_self_attention_is_exchanged():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    fused = with_fused_parts(spec, FusedParts(qkv_rope="triton"))
    assert fused.submodules.self_attention.module is FusedSelfAttention
    assert spec.submodules.self_attention.module is not FusedSelfAttention, "not in place"
    same = (fused.submodules.mlp, fused.submodules.self_attention.submodules)
    assert same == (spec.submodules.mlp, spec.submodules.self_attention.submodules)
    assert with_fused_parts(spec, FusedParts()) is spec
    with pytest.raises(ValueError, match=r"without one for qkv_rope; set model\.fused=off"):
        with_fused_parts(fused, FusedParts(qkv_rope="triton"))


def test_norms_and_activation_are_exchanged():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    fused = with_fused_parts(spec, FusedParts(swiglu="triton", norm="triton")).submodules
    assert (fused.input_layernorm, fused.pre_mlp_layernorm) == (FusedRMSNorm, FusedRMSNorm)
    assert mlp_submodules(fused.mlp).activation_func is SwiGLU
    assert mlp_submodules(spec.submodules.mlp).activation_func is None
    assert fused.self_attention == spec.submodules.self_attention


def mlp_submodules(mlp):
    """Of a ModuleSpec, or of what newer versions of Megatron hold: a functools.partial."""
    return mlp.submodules if hasattr(mlp, "submodules") else mlp.keywords["submodules"]
