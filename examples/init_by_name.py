"""Deterministic weights keyed by parameter name: equal models in every parallel layout.

Megatron draws weights rank by rank, so a model's weights depend on TP, PP, EP and on every random
number drawn before. Here each full weight is drawn from (seed, global name) alone, and a rank
keeps its slice.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_magi.adapter.model_chunks import model_chunks

RESIDUAL_PROJECTIONS = ("linear_proj.weight", "linear_fc2.weight")
"""Weights that write into the residual stream; their std shrinks with depth, as in Megatron."""


@torch.no_grad()
def init_by_name(model: Any, seed: int = 1234, std: float | None = None) -> None:
    """Overwrite every parameter by its slice of a full weight drawn from (seed, global name).

    A global name counts layers over pipeline stages and experts over expert-parallel ranks. Norm
    weights become 1 and biases 0; matrices are drawn from normal(0, std), residual projections from
    normal(0, std / sqrt(2 * num_layers)). Call it on every rank, before the optimizer is built.

    Args:
        model: GPTModel or list of its model chunks, DDP-wrapped or not.
        std: Default: the config's init_method_std.

    Raises:
        NotImplementedError: weights of several experts in one parameter.
    """
    for chunk in model_chunks(model):
        config = get_model_config(chunk)
        base = config.init_method_std if std is None else std
        for name, param in named_global_parameters(chunk):
            if param.dim() < 2:
                param.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
                continue
            scaled = name.endswith(RESIDUAL_PROJECTIONS)
            weight_std = base / math.sqrt(2 * config.num_layers) if scaled else base
            parts = num_stacked(name, config)
            weight = _local_weight(name, param, seed, weight_std, parts)
            param.copy_(weight)
            drawn = getattr(param, "_high_precision_init_val", None)  # of weights kept in fp8
            if drawn is not None:  # the optimizer's own copy begins with it
                drawn.copy_(weight)


def named_global_parameters(chunk: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name that is the same in every layout, parameter) of one model chunk."""
    modules = dict(chunk.named_modules())
    for name, param in chunk.named_parameters():
        owner = modules[name.rpartition(".")[0]]
        if getattr(param, "shared_embedding", False):
            name = "embedding.word_embeddings.weight"
        elif name.startswith("decoder.layers."):
            local = re.match(r"decoder\.layers\.(\d+)\.", name)
            assert local is not None, name
            number = modules[f"decoder.layers.{local[1]}"].layer_number
            name = f"decoder.layers.{number - 1}.{name[local.end() :]}"
        yield _global_expert(name, owner), param


def sliced_dim(param: Tensor) -> int:
    """Dimension along which tensor parallelism slices a parameter, or -1 if each rank has all."""
    sliced = getattr(param, "tensor_model_parallel", False)
    return int(getattr(param, "partition_dim", -1)) if sliced else -1


def num_stacked(name: str, config: Any) -> int:
    """Number of matrices that a weight stacks, each sliced by itself: 2 for gate and up, else 1."""
    return 2 if config.gated_linear_unit and ".linear_fc1." in name else 1


def _global_expert(name: str, owner: Any) -> str:
    single = re.search(r"\.local_experts\.(\d+)\.", name)
    # TransformerEngine's grouped linear layer has one parameter per expert: linear_fc1.weight3.
    # Megatron's own, in which each holds all experts, are experts.weight1 and experts.weight2.
    grouped = re.fullmatch(r"(.*\.experts)\.(.+\.\D+)(\d+)", name)
    if single is not None:
        prefix, number, rest = name[: single.start()], single[1], name[single.end() :]
    elif grouped is not None:
        prefix, rest, number = grouped.groups()
    elif ".experts." in name:
        raise NotImplementedError(
            f"init_by_name requires one parameter an expert, got the grouped weight {name}; set "
            f"moe_grouped_gemm=False"
        )
    else:
        return name
    config = owner.config
    per_rank = config.num_moe_experts // config.expert_model_parallel_size
    index = parallel_state.get_expert_model_parallel_rank() * per_rank + int(number)
    return f"{prefix}.experts.{index}.{rest}"


def _local_weight(name: str, param: Tensor, seed: int, std: float, parts: int) -> Tensor:
    """This rank's slice of a weight that stacks `parts` matrices."""
    dim = sliced_dim(param)
    size, rank = _slices(name) if dim >= 0 else (1, 0)
    shape = list(param.shape)
    if dim >= 0:
        shape[dim] *= size
    full = torch.empty(shape, dtype=torch.float32, device="cpu").normal_(
        0.0, std, generator=_generator(name, seed)
    )
    if dim < 0:
        return full
    pieces = [part.chunk(size, dim)[rank] for part in full.chunk(parts, dim)]
    return torch.cat(pieces, dim)


def _slices(name: str) -> tuple[int, int]:
    """(number of tensor-parallel slices, this rank's) of a dense or an expert weight."""
    if ".experts." not in name:
        return (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
    return (
        parallel_state.get_expert_tensor_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_rank(),
    )


def _generator(name: str, seed: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
