"""The hybrid stack without TransformerEngine: its layers, its final norm, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_magi.adapter.hybrid_spec import HybridStack, LocalHybridStack, hybrid_local_spec
from megatron_magi.adapter.rms_norm import LocalNorm


def test_hybrid_spec_refuses_layers_it_does_not_have() -> None:
    with pytest.raises(
        NotImplementedError, match=r"requires a layer pattern of \* - E M G( \+)?, got D;"
    ):
        LocalHybridStack(None, layer_type_list=["M", "*", "D"])


def test_each_layer_is_one_part_of_a_local_layer() -> None:
    """The other part and its norm do nothing; each has its own norm in front."""
    layers = hybrid_local_spec.submodules
    attention = layers.attention_layer.submodules
    assert attention.mlp is attention.pre_mlp_layernorm is IdentityOp
    assert attention.input_layernorm is LocalNorm
    assert attention.self_attention is not IdentityOp
    for layer in (layers.mlp_layer, layers.moe_layer):
        parts = layer.submodules
        assert parts.self_attention is parts.input_layernorm is IdentityOp
        assert parts.pre_mlp_layernorm is LocalNorm and parts.mlp is not IdentityOp
    assert "TE" not in str(hybrid_local_spec)


def module_of(mlp: Any) -> Any:
    """Of a ModuleSpec, or of what newer versions of Megatron hold: a functools.partial."""
    return mlp.module if hasattr(mlp, "module") else mlp.func


def test_experts_are_in_the_moe_layer_alone() -> None:
    layers = hybrid_local_spec.submodules
    kinds = [module_of(layer.submodules.mlp) for layer in (layers.mlp_layer, layers.moe_layer)]
    assert kinds[1] is MoELayer and kinds[0] is not MoELayer


@pytest.mark.parametrize("is_last", [False, True])
def test_the_last_stage_has_a_final_norm_of_its_own(
    is_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's constructor makes none: its norm is TransformerEngine's."""
    given: dict[str, Any] = {}

    def construct(self: Any, config: Any, **arguments: Any) -> None:
        torch.nn.Module.__init__(self)
        self.post_process = is_last
        given.update(arguments)

    monkeypatch.setattr(HybridStack, "__init__", construct)
    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=1,
                               normalization="RMSNorm", layernorm_epsilon=1e-3)  # fmt: skip
    stack = LocalHybridStack(config, layer_type_list=["*", "-"], pre_process=True)
    assert given == {
        "layer_type_list": ["*", "-"], "pre_process": True, "post_layer_norm": False}  # fmt: skip
    assert stack.post_layer_norm is True and hasattr(stack, "final_norm") == is_last
    if is_last:
        x = torch.randn(3, 1, 8)
        want = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
        torch.testing.assert_close(stack.final_norm(x), want)
