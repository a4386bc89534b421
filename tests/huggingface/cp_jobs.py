"""Training steps of tiny models over a group, for the processes of a pool."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from megatron_magi import undispatch
from megatron_magi.huggingface import Packing, dispatch_batch
from tests.huggingface.tiny_models import build, config, gradients, positions, tokens

Result = tuple[float, Tensor, list[Tensor]]


def batch(kind: str) -> tuple[Tensor, Tensor, Packing]:
    """(input ids, labels, packing) of a kind of batch."""
    ids = tokens(1, 53) if kind != "padded" else tokens(2, 21)
    labels = ids.clone()
    labels[:, :3] = -100
    if kind == "packed":
        return ids, labels, Packing(position_ids=positions(20, 5, 28))
    if kind == "sums":
        return ids, labels, Packing(cu_seqlens=torch.tensor([0, 20, 25, 53]))
    keep = torch.ones_like(ids)
    keep[0, 15:] = 0
    return ids, labels.masked_fill(keep == 0, -100), Packing(attention_mask=keep)


def whole(name: str, kind: str) -> Result:
    """(loss, logits, gradients) of one process, by the model's own arguments."""
    ids, labels, packing = batch(kind)
    names = {"position_ids": packing.position_ids, "cu_seq_lens_q": packing.cu_seqlens,
             "attention_mask": packing.attention_mask}  # fmt: skip
    inputs = {key: value for key, value in names.items() if value is not None}
    model = build(config(name), "magi")
    output = model(input_ids=ids, labels=labels, **inputs)
    output.loss.backward()
    return output.loss.item(), output.logits.detach().flatten(0, 1), gradients(model)


def spread(rank: int, name: str, kind: str) -> Result:
    """The same over all processes of the default group."""
    ids, labels, packing = batch(kind)
    model = build(config(name), "magi")
    inputs = dispatch_batch(ids, labels, model.config, dist.group.WORLD, packing)
    output = model(**inputs)
    output.loss.backward()
    loss = output.loss.detach().clone()
    for tensor in [loss, *gradients(model)]:
        dist.all_reduce(tensor)
    logits = undispatch(output.logits[0].detach(), inputs["magi_batch"].first, dist.group.WORLD)
    return float(loss), logits, gradients(model)


def sharded(rank: int, name: str, kind: str) -> tuple[float, list[Tensor], int]:
    """(loss, gradients, number of plans) with FSDP in mixed precision, which casts the inputs of
    every layer."""
    ids, labels, packing = batch(kind)
    model = build(config(name), "magi")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    inputs = dispatch_batch(ids, labels, model.config, dist.group.WORLD, packing)
    loss = model(**inputs).loss
    (loss * dist.get_world_size()).backward()
    dist.all_reduce(loss := loss.detach().clone())
    grads = [grad.full_tensor() for grad in gradients(model)]  # type: ignore[attr-defined]
    return float(loss), grads, len(inputs["magi_batch"].plans)


def heads_of_plans(rank: int) -> list[Any]:
    """(window, heads) of the plans that a model with windows has asked for."""
    model = build(config("gemma3"), "magi")
    inputs = dispatch_batch(tokens(1, 32), None, model.config, dist.group.WORLD)
    model(**inputs)
    return sorted((window or 0, heads.num_heads_q) for window, heads in inputs["magi_batch"].plans)
