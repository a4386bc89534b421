"""A tiny Qwen3-VL on documents with images at odd places; JSON in, JSON out."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from absent import stand_in_for_absent

import megatron_magi.adapter  # noqa: F401  prepares megatron before it is imported

stand_in_for_absent()

import tiny_qwen  # noqa: E402
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl import text_model  # noqa: E402
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.attention import (  # noqa: E402
    Qwen3VLSelfAttention,
)
from megatron.core import parallel_state  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

from examples.init_by_name import init_by_name  # noqa: E402
from megatron_magi.adapter import MEGATRON_VERSION, layer_spec  # noqa: E402
from megatron_magi.bridge.hook_points import bridge_points  # noqa: E402
from megatron_magi.bridge.launch import BridgeLaunch  # noqa: E402
from megatron_magi.config import CostTable, MagiConfig  # noqa: E402
from megatron_magi.launcher.flags import LauncherOptions  # noqa: E402
from megatron_magi.launcher.install import put_in_place  # noqa: E402

HOOKS = ("gpt", "vision-rows", "vision-model", "vision-positions")
VOCAB, PATCH = 96, 12
DOCUMENTS: list[list[int | tuple[int, int]]] = [
    [3, (2, 3), 4],
    [1, (2, 2), 12, (2, 3), 29, (3, 3), 12],
    [5],
    [(3, 3), 6, (1, 5), (2, 4)],
]
"""Of every document its parts: a number of words, or an image of so many rows and columns."""

Rows = dict[str, torch.Tensor]


def run(
    magi: bool = True,
    images: bool = True,
    multiple: int = 16,
    chunk_size: int | None = None,
    stock_positions: bool = False,
) -> dict[str, Any]:
    """The loss, and gradients by name, summed over the ranks.

    Args:
        magi: all documents as one stream, by the hooks; else one after another, by none.
        images: False leaves the pixels out, so that their rows are words.
        multiple: of rows to which documents are padded.
        chunk_size: of the plan.
        stock_positions: positions are selected by Bridge's own rows.
    """
    world = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=world)
    model_parallel_cuda_manual_seed(1)
    launch = put_hooks_in_place(chunk_size) if magi else None
    model = new_model(world)
    documents = [document(i, parts, images) for i, parts in enumerate(DOCUMENTS)]
    if stock_positions:
        select_positions_by_stock(model)
    batches = [packed(documents, multiple)] if magi else [(each, None) for each in documents]
    total = torch.zeros(())
    for rows, params in batches:
        output, loss_mask = model(**rows, packed_seq_params=params)
        loss = (output * loss_mask).sum()
        loss.backward()
        total += loss.detach()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    found = {"loss": total, **{n: g for n, g in gradients.items() if g is not None}}
    for each in found.values():
        torch.distributed.all_reduce(each, group=parallel_state.get_context_parallel_group())
    shared = launch is not None and world > 1 and launch.stats.means()["magi key rows received"] > 0
    return {
        "keys travel": shared,
        "sums": {name: x.flatten().tolist() for name, x in found.items()},
    }


def put_hooks_in_place(chunk_size: int | None) -> BridgeLaunch:
    magi = MagiConfig(chunk_size=chunk_size, costs=CostTable(tile_q=8, tile_k=8))
    args = SimpleNamespace(micro_batch_size=1, reset_attention_mask=False, sft=True)
    launch = BridgeLaunch(LauncherOptions(magi), args=args)
    points = {point.name: point for point in bridge_points(MEGATRON_VERSION)}
    put_in_place([points[name] for name in HOOKS], launch)
    return launch


def new_model(cp_size: int) -> torch.nn.Module:
    config = TransformerConfig(
        num_layers=3,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=16,
        mrope_section=[4, 2, 2],
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.1,
        context_parallel_size=cp_size,
        calculate_per_token_loss=True,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
    )
    config.apply_rotary_pos_emb_in_fp32 = False  # a field of Bridge's config
    spec = layer_spec.llama_layer_spec(config, attention="stock")
    for layer in spec.layer_specs:
        layer.submodules.self_attention.module = Qwen3VLSelfAttention
    language = text_model.Qwen3VLGPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=128,
        max_sequence_length=256,
        position_embedding_type="mrope",
        scatter_embedding_sequence_parallel=False,
    )
    init_by_name(language)
    model = tiny_qwen.TinyQwen(language, PATCH, parallel_state.get_context_parallel_group())
    torch.nn.init.normal_(
        model.vision_model.weight, std=0.3, generator=torch.Generator().manual_seed(3)
    )
    return model


def document(number: int, parts: list[int | tuple[int, int]], images: bool) -> Rows:
    """Tokens, positions, shifted labels, loss mask and pixels of one document."""
    rng = np.random.default_rng(number)
    tokens: list[int] = []
    positions: list[tuple[int, int, int]] = []
    first = 0
    for part in parts:
        if isinstance(part, int):
            tokens += rng.integers(0, VOCAB, part).tolist()
            positions += [(first + i,) * 3 for i in range(part)]
        else:
            grid = itertools.product(*map(range, part))
            tokens += [tiny_qwen.IMAGE] * (part[0] * part[1])
            positions += [(first, first + row, first + column) for row, column in grid]
        first = max(map(max, positions)) + 1
    ids = torch.tensor([tokens])
    counted = (ids != tiny_qwen.IMAGE).float()
    counted[:, -1] = 0
    count = int((ids == tiny_qwen.IMAGE).sum())
    pixels = torch.from_numpy(rng.standard_normal((count, PATCH))).float()
    rows = {
        "input_ids": ids,
        "position_ids": torch.tensor(positions).T[:, None],
        "labels": ids.roll(-1) % VOCAB,
        "loss_mask": counted,
    }
    return {**rows, "pixel_values": pixels} if images and count else rows


def packed(documents: list[Rows], multiple: int) -> tuple[Rows, PackedSeqParams]:
    """One stream, with every document padded to the multiple, and its boundaries."""
    lengths = [each["input_ids"].shape[1] for each in documents]
    slots = [-(-length // multiple) * multiple for length in lengths]
    rows = {
        name: torch.cat(
            [
                torch.nn.functional.pad(each[name], (0, slot - each[name].shape[-1]))
                for each, slot in zip(documents, slots, strict=True)
            ],
            dim=-1,
        )
        for name in ("input_ids", "position_ids", "labels", "loss_mask")
    }
    pixels = [each["pixel_values"] for each in documents if "pixel_values" in each]
    if pixels:
        rows["pixel_values"] = torch.cat(pixels)
    bounds, padded = (
        torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32)
        for each in (lengths, slots)
    )
    return rows, PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=max(slots),
        max_seqlen_kv=max(slots),
    )


def select_positions_by_stock(model: Any) -> None:
    """Give the language model the positions of the zigzag rows, and everything else by the plan."""
    stock = tiny_qwen.get_packed_seq_cp_partition_indices.__wrapped__
    language, forward = model.language_model, model.forward

    def with_stock_positions(**rows: Any) -> Any:
        index = stock(
            rows["packed_seq_params"],
            total_tokens=rows["input_ids"].size(1),
            cp_size=2,
            cp_rank=torch.distributed.get_rank(),
            device="cpu",
        )
        positions = rows["position_ids"].index_select(2, index)

        def replace(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            return args, {**kwargs, "position_ids": positions}

        language.register_forward_pre_hook(replace, with_kwargs=True)
        return forward(**rows)

    model.forward = with_stock_positions
