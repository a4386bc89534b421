"""Megatron's softmax_type: a logit without a value in every row's softmax.

"off-by-one" has logit 0 for all heads, "learnable" has one parameter for each head. The sink
joins the normaliser inside attention (`core/kernel/sink.py`), with every kernel and every layout.
The parameter has the name, shape and checkpoint axis that DotProductAttention and
TEDotProductAttention use, so that checkpoints can be exchanged with them in both directions.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn

SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
PARTITIONED = {"softmax_offset": 0}
"""Checkpoint axis along which each tensor-parallel rank holds the part of its heads."""


def add_softmax_offset(core: nn.Module, config: TransformerConfig) -> None:
    """Give a core attention its `softmax_offset`: [heads of this TP rank] in params_dtype, or None.

    config.init_method initialises the learnable one, as in Megatron's local attention.

    Raises:
        NotImplementedError: a softmax_type that is not one of SOFTMAX_TYPES.
    """
    if config.softmax_type not in SOFTMAX_TYPES:
        raise NotImplementedError(
            f"softmax_type must be one of {', '.join(SOFTMAX_TYPES)}, got "
            f"{config.softmax_type!r}; choose one, or keep Megatron's own core attention"
        )
    if config.softmax_type == "vanilla":
        core.register_parameter("softmax_offset", None)
        return
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    on_gpu = torch.cuda.is_available() and not config.use_cpu_initialization
    device = torch.cuda.current_device() if on_gpu else "cpu"
    offset = torch.zeros(heads, dtype=config.params_dtype, device=device)
    if config.softmax_type == "off-by-one":
        core.register_buffer("softmax_offset", offset, persistent=False)
        return
    parameter = nn.Parameter(offset)
    if config.perform_initialization:
        config.init_method(parameter)
    # Each tensor-parallel rank has other heads. Without these attributes the gradient norm would
    # count the heads of one rank only.
    set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    core.register_parameter("softmax_offset", parameter)


def sharded_offset(core: nn.Module, prefix: str, offsets: Any, metadata: Any) -> dict[str, Any]:
    """The learnable parameter as Megatron's distributed checkpoints hold it; {} without one."""
    groups = {}
    if metadata and "dp_cp_group" in metadata:
        groups["dp_cp_group"] = metadata["dp_cp_group"]
        groups["tp_group"] = parallel_state.get_tensor_model_parallel_group()
    state = core.state_dict(prefix="", keep_vars=True)
    found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
        state, prefix, PARTITIONED, offsets, **groups
    )
    return found
