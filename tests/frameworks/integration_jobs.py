"""The files of frameworks that import ``magi_attention``, run as they are on our names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magi.magi_attention import install
from tests.frameworks import token_tables
from tests.huggingface import tiny_models
from tests.process_pool import subgroup

DOCUMENTS = (137, 1822, 89)
LENGTH, IGNORED = 1531, -100
NODES, PATHS = [40, 30, 50, 20], [[0, 1], [0, 2, 3]]
VEOMNI_ROOMS = ("ops.kernels.attention", "distributed", "utils")


def automodel(path: str) -> Any:
    """NeMo Automodel's file."""
    install()
    if path not in sys.path:
        sys.path.insert(0, path)
    return importlib.import_module("nemo_automodel.components.distributed.context_parallel.magi")


def megatron_lite(path: str) -> Any:
    """Megatron Lite's file, which imports nothing of Megatron."""
    install()
    spec = importlib.util.spec_from_file_location("lite_magi", path)
    made = importlib.util.module_from_spec(spec)
    sys.modules["lite_magi"] = made
    spec.loader.exec_module(made)
    return made


def veomni(path: str) -> Any:
    """VeOmni's package of that attention, without the models that its own ``__init__`` imports."""
    install()
    for room in VEOMNI_ROOMS:
        parts = ["veomni", *room.split(".")]
        for name in (".".join(parts[:n]) for n in range(1, len(parts) + 1)):
            if name not in sys.modules:
                sys.modules[name] = types.ModuleType(name)
                sys.modules[name].__path__ = [str(Path(path, *name.split(".")))]
    return importlib.import_module("veomni.ops.kernels.attention.magi")


def all_reduced(tensors: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    for x in tensors:
        dist.all_reduce(x, group=group)
    return tensors


def language_model(attention: str) -> Any:
    """A small Llama in fp32, the same for every attention."""
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_config(
        tiny_models.config("llama"), attn_implementation=attention
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    return made


def language_batch() -> dict[str, Tensor]:
    ids = tiny_models.tokens(1, LENGTH)
    labels = ids.roll(-1, 1)
    labels[:, -1] = IGNORED
    return {"input_ids": ids, "labels": labels}


def language_gradients(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    """Of the sum over tokens, without what belongs to the whole batch."""
    labels = batch.pop("labels")
    logits = model(**batch, use_cache=False).logits.float().flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    (loss / LENGTH).backward()
    return [p.grad for p in model.parameters()]


def automodel_language(rank: int, path: str, cp_size: int) -> list[Tensor] | None:
    """A Llama of Transformers by Automodel's ``attn_implementation="magi"``."""
    group = subgroup(cp_size)
    if rank >= cp_size:
        return None
    file = automodel(path)
    file._MAGI_REGISTERED = False  # other tests may have taken the name since
    file.register_magi_attention()
    model = language_model("magi")
    state = file.MagiState(enabled=True, cp_group=group, cp_size=cp_size)
    batch = state.make_cp_batch(None, language_batch(), model=model)
    assert batch["input_ids"].shape[1] == (LENGTH if cp_size == 1 else 1024)
    return all_reduced(language_gradients(model, batch), group)


def automodel_packed(rank: int, path: str, cp_size: int) -> list[Tensor] | None:
    """Packed documents by Automodel's own models."""
    group = subgroup(cp_size)
    if rank >= cp_size:
        return None
    file = automodel(path)
    bounds, _ = token_tables.documents(DOCUMENTS)
    ids = token_tables.tokens(bounds[-1])
    config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    batch = {"input_ids": ids, "labels": ids, "cu_seqlens": torch.tensor(bounds)}
    local, _ = file.magi_prepare_packed_cp(SimpleNamespace(config=config), batch, group)
    assert torch.equal(ids[local["position_ids"]], local["input_ids"])
    file.set_active_cp_group(group)
    attend = file.make_magi_attn_func()
    return all_reduced(token_tables.gradients(local["input_ids"], attend, torch.bfloat16), group)


def automodel_tree(rank: int, path: str) -> list[Tensor] | None:
    """Samples that share prefixes, on one rank."""
    group = subgroup(1)
    if rank >= 1:
        return None
    file = automodel(path)
    file.set_active_cp_group(group)
    file.set_active_attn_spec(file.AttnMaskSpec.prefix_tree(NODES, PATHS)[0])
    ids = token_tables.tokens(sum(NODES))
    return token_tables.gradients(ids, file.make_magi_attn_func(), torch.bfloat16)


def lite(rank: int, path: str, cp_size: int) -> list[Tensor] | None:
    """Packed documents by Megatron Lite's core attention."""
    group = subgroup(cp_size)
    if rank >= cp_size:
        return None
    file = megatron_lite(path)
    bounds, _ = token_tables.documents(DOCUMENTS)
    key = file.build_magi_attention_runtime_key(
        torch.tensor(bounds, dtype=torch.int32), num_heads_q=4, num_heads_kv=2, head_dim=16,
        cp_group=group,
    )  # fmt: skip
    ids = token_tables.tokens(bounds[-1])
    local = file.dispatch_magi_attention_tensor(ids, key)
    assert torch.equal(file.undispatch_magi_attention_tensor(local, key), ids)
    attention, packed = file.MagiDotProductAttention(16), SimpleNamespace(magi_runtime_key=key)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, packed_seq_params=packed)

    return all_reduced(token_tables.gradients(local, attend, torch.bfloat16), group)
