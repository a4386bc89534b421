"""A residual addition that also computes the norm behind it, in one kernel.

In a decoder the sum of a sublayer's output and the residual is normalised next, by the norm before
the MLP or by that of the next layer. The addition writes both, and leaves the normalised rows at
the sum, from where the norm takes them (`norm.take_normed`). The sum is rounded before it is
normalised, so both have the bits of two kernels. Where something lies between addition and norm,
the norm finds nothing, or nothing that is for it, and normalises as it would without the addition.
Changes of the sum or the weight through `.data` are not seen, as autograd does not see them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor
from torch.nn.modules import module as modules

from megatron_magi.adapter.fused.norm import (
    NORMED,
    PAST_NORM,
    WIDEST,
    AddAndNormalize,
    BlockRMSNorm,
    FusedRMSNorm,
    Normed,
    add_rows_past_norm,
    state_of,
)


class JoinedAddition:
    """`add_rows_past_norm` with the norm that reads its sum next."""

    def __init__(self, norm: FusedRMSNorm) -> None:
        self.norm = norm

    def __call__(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Megatron's addition: (x with its bias, residual, dropout probability) -> their sum."""
        return partial(self._add, add_rows_past_norm(training, fused), training)

    def _add(
        self, add: Any, training: bool, x_with_bias: Any, residual: Tensor, prob: float
    ) -> Tensor:
        x, bias = x_with_bias
        drops = training and prob != 0
        if bias is not None or drops or not self._fits(x, residual):
            out: Tensor = add(x_with_bias, residual, prob)
            return out
        past = residual.__dict__.pop(PAST_NORM, residual)
        return add_and_normalize(x, past, self.norm)

    def _fits(self, x: Tensor, residual: Tensor) -> bool:
        """Whether one kernel can add these, and may read the norm's weight now.

        Inference tensors do not count their changes in place, which `take_normed` must know.
        """
        weight = self.norm.weight
        return (
            (x.dtype, x.shape, x.device) == (residual.dtype, residual.shape, residual.device)
            and x.is_contiguous()
            and residual.is_contiguous()
            and type(weight) is torch.nn.Parameter
            and weight.shape == x.shape[-1:]
            and weight.numel() <= WIDEST
            and not has_hooks(self.norm)
            and not (torch.is_inference_mode_enabled() or weight.is_inference())
        )


def add_and_normalize(x: Tensor, residual: Tensor, norm: FusedRMSNorm) -> Tensor:
    """x + residual, of one dtype and contiguous, with its normalised rows left at it."""
    weight = norm.weight
    total: Tensor
    total, out = AddAndNormalize.apply(x, residual, weight, norm.eps, norm.into_main_grad)
    setattr(total, NORMED, Normed(out, norm, state_of(total, weight)))
    return total


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether something runs when a module is called, such as the arrival of its gathered weight,
    or sees what it returns."""
    own: tuple[Any, ...] = (module._forward_pre_hooks, module._forward_hooks)
    own += (module._backward_pre_hooks, module._backward_hooks)
    own += (modules._global_forward_pre_hooks, modules._global_forward_hooks)
    own += (modules._global_backward_pre_hooks, modules._global_backward_hooks)
    return any(own)


def join_additions(model: Any) -> int:
    """Let the additions of a GPTModel's decoder compute the norms behind them.

    Call it before the model is wrapped. Other additions stay as they are: those of a spec without
    `add_rows_past_norm`, and those whose sum goes into cross attention, out of the pipeline stage,
    out of a recomputed block or into memory of the host.

    Returns:
        How many compute a norm.
    """
    decoder = getattr(model, "decoder", None)
    layers = list(getattr(decoder, "layers", ()))
    if not layers or _leaves_the_gpu(model.config) or _recomputes_norms(model.config):
        return 0
    behind = [getattr(layer, "input_layernorm", None) for layer in layers[1:]]
    behind.append(getattr(decoder, "final_layernorm", None))
    is_block = model.config.recompute_granularity == "full"
    count = 0
    for layer, norm in zip(layers, behind, strict=True):
        if isinstance(getattr(layer, "cross_attention", None), IdentityOp):
            count += _join(layer, "self_attn_bda", layer.pre_mlp_layernorm)
        if not is_block:
            count += _join(layer, "mlp_bda", norm)
    return count


def _join(layer: Any, addition: str, norm: Any) -> int:
    if getattr(layer, addition, None) is not add_rows_past_norm:
        return 0
    if type(norm) not in (BlockRMSNorm, FusedRMSNorm):
        return 0
    setattr(layer, addition, JoinedAddition(norm))
    return 1


def _leaves_the_gpu(config: Any) -> bool:
    wanted = ("cpu_offloading", "fine_grained_activation_offloading")
    return any(getattr(config, name, False) for name in wanted)


def _recomputes_norms(config: Any) -> bool:
    modules = config.recompute_modules or ()
    return config.recompute_granularity == "selective" and "layernorm" in modules
