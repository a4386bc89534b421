"""A step of torchtitan's own trainer on packed documents, on the CPU in fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

LENGTHS = (137, 2041, 89)
VOCAB = 2048
IGNORED = -100


def batch() -> tuple[dict[str, Tensor], Tensor]:
    """Packed documents as torchtitan's loader gives them: labels are shifted already."""
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(VOCAB, (sum(LENGTHS),), generator=generator)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    labels = tokens.roll(-1)
    labels[torch.tensor(LENGTHS).cumsum(0) - 1] = IGNORED
    labels[5:9] = IGNORED
    return {"input": tokens, "positions": positions}, labels


def configuration(attention: str, cp_size: int, num_layers: int = 2) -> Any:
    """The debug model with our attention or one of torchtitan's."""
    from torchtitan.models.llama3 import config_registry, model_registry

    from examples.torchtitan.config_registry import llama3_debugmodel_magi

    if attention == "magi":
        made = llama3_debugmodel_magi()
    else:
        made = config_registry.llama3_debugmodel()
        made.model_spec = model_registry("debugmodel", attn_backend=attention)
    made.model_spec.model.layers = made.model_spec.model.layers[:num_layers]
    made.training.mixed_precision_param = "float32"
    made.training.disable_cuda_graphs = True
    made.activation_checkpoint = None
    made.parallelism.context_parallel_degree = cp_size
    return made


def trainer(config: Any, world_size: int) -> Any:
    """torchtitan's trainer after its start, without what needs a GPU or files."""
    from torchtitan.components.loss import CrossEntropyLoss

    from benchmarks.train.titan_trainer import bare_trainer, dims_of

    config.loss = CrossEntropyLoss.Config(global_vocab_size=VOCAB)
    dims = dims_of(config.parallelism, world_size, "cpu")
    made = bare_trainer(config, dims, "cpu")
    made.model_parts = [parallel_model(config, dims)]
    return made


def parallel_model(config: Any, dims: Any) -> Any:
    """The model with weights that depend on their shapes alone, spread as torchtitan does.

    ``parallelize_llama`` hands FSDP a mesh of several axes, which it takes in nightly builds of
    torch only; here it has those axes as one.
    """
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

    torch.manual_seed(3)
    model = config.model_spec.model.build()
    with torch.no_grad():
        model.init_weights()
        generator = torch.Generator().manual_seed(3)
        for weight in model.parameters():
            if weight.ndim == 2:  # large enough that attention has something to say
                weight.copy_(
                    torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5
                )
    model.parallelize(dims)
    apply_fsdp_to_decoder(
        model, dims.get_mesh("loss" if dims.cp_enabled else "dp_shard"),
        param_dtype=torch.float32, reduce_dtype=torch.float32, pp_enabled=False,
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, FSDPModule):  # gloo cannot multiply, not even by torchtitan's 1.0
            module.set_force_sum_reduction_for_comms(True)
    return model


def step(_: int, attention: str, cp_size: int) -> tuple[float, int, dict[str, Tensor]]:
    """(the loss over all ranks, tokens of this rank, whole gradients by name)."""
    attend_on_the_cpu()
    made = trainer(configuration(attention, cp_size), cp_size)
    inputs, labels = batch()
    counted = (labels != IGNORED).sum()
    loss = made.forward_backward_step(
        input_dict=inputs, labels=labels, global_valid_tokens=counted
    ).detach()
    if cp_size > 1:
        torch.distributed.all_reduce(loss, group=made.parallel_dims.get_mesh("loss").get_group())
    gradients = {name: whole(p.grad) for name, p in made.model_parts[0].named_parameters()}
    return float(loss), made.ntokens_seen, gradients


def whole(gradient: Any) -> Tensor:
    """The tensor of all ranks' parts."""
    full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return full.detach()


def attend_on_the_cpu() -> None:
    """FlexAttention has no gradients on the CPU: SDPA has, with the mask that torchtitan made."""
    from torch.nn.attention.flex_attention import create_block_mask
    from torchtitan.models.common import attention

    attention.FlexAttention._compiled_flex_attn = staticmethod(attend_densely)
    attention._compiled_create_block_mask = create_block_mask


def attend_densely(
    q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, scale: float | None, **others: Any
) -> tuple[Tensor, None]:
    """SDPA, whose output is FlexAttention's."""
    from torch.nn.attention.flex_attention import create_mask, flex_attention

    mask = create_mask(block_mask.mask_mod, 1, 1, q.shape[2], k.shape[2], device="cpu")
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    flex = flex_attention(q.detach(), k.detach(), v.detach(), block_mask=block_mask, scale=scale)
    torch.testing.assert_close(out.detach(), flex, rtol=1e-5, atol=1e-5)
    return out, None
