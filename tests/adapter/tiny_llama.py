"""A tiny Llama trained for a few steps by stock megatron-core in one parallel layout.

Everything random is a function of names and indices, so every layout trains on the same weights,
tokens, documents and loss masks, and only the numbers' last digits may differ.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import attention_options as options
import mtp_runs
import numpy as np
import state_runs
import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import Float16Module

from examples.init_by_name import init_by_name
from megatron_magi.adapter import (
    layer_spec,
    loss,
    packed,
    pipeline_agreement,
    plugin,
    rank_batch,
)
from megatron_magi.adapter.model_chunks import model_chunks
from megatron_magi.config import CostTable, MagiConfig
from megatron_magi.core.mask import builders

try:  # the worker has this folder on its path, other tests the repository's root
    from dense_batch import dense_batch
    from dense_latent import with_dense_attention
except ImportError:
    from tests.adapter.dense_batch import dense_batch
    from tests.adapter.dense_latent import with_dense_attention

VOCAB, STEPS = 128, 2


@dataclasses.dataclass(frozen=True)
class Layout:
    """One way to spread the same training run over processes."""

    name: str
    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    dp: int = 1
    ep: int = 1
    distributed_optimizer: bool = False
    overlap: bool = False
    recompute: str | None = None
    attention: str = "magi"
    layers: str = "local"
    """local; te: TransformerEngine's (a stand-in has to be there); hybrid, of the local spec."""
    experts: int | None = None
    tied: bool = False
    window: tuple[int, int] | None = None
    window_skip: int | None = None
    seq_length: int = 96
    packed: bool = True
    restart_positions: bool = True
    moved_boundary: bool = False
    moved_boundary_rank: int | None = None
    per_token_loss: bool = True
    batched_p2p: bool = False
    bf16: bool = False
    overlap_degree: int | None = None
    chunk_size: int | None = None
    latent: str | None = None
    """Multi-latent attention with this rope_type."""
    q_lora_rank: int | None = 24
    mtp: int | None = None
    adam_eps: float = 1e-8
    mtp_hsm: bool = False
    loss_mask_to_model: bool = True
    stock_mtp: str | None = None
    softmax_type: str = "vanilla"
    qk_clip: float | None = None
    log_max_logit: bool = False
    tile: int = 128
    """Rows and keys of a tile by which work is balanced; small ones give ranks chunks in turns."""
    num_layers: int = 4
    steps: int = STEPS
    microbatches: int = 2
    """Of all replicas, in a step."""
    pattern: str | None = None
    """Of a hybrid model with four layers; default: attention, MLP, attention and MoE."""
    settings: dict[str, Any] | None = None
    """Fields of the model's config beside those of `model_config`."""
    by_document: bool = False
    """Every document is a microbatch of its own."""
    empty_documents: bool = False
    damage: str | None = None
    """A function of state_runs that damages the packed parameters."""

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.dp


def train(layout: Layout) -> dict[str, list[float]]:
    """Losses (mean over counted tokens) and gradient norms of every step; equal on all ranks."""
    parallel_state.initialize_model_parallel(**parallel_sizes(layout))
    model_parallel_cuda_manual_seed(1)
    config = model_config(layout)
    chunks = build_chunks(layout, config)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=3e-3,
            adam_eps=layout.adam_eps,
            weight_decay=0.0,
            clip_grad=1.0,
            bf16=layout.bf16,
            params_dtype=torch.bfloat16 if layout.bf16 else torch.float32,
            use_distributed_optimizer=layout.distributed_optimizer,
            overlap_param_gather=layout.overlap and layout.distributed_optimizer,
        ),
        chunks,
    )
    connect(layout, config, chunks, optimizer)
    mtp_runs.keep_stock(layout.stock_mtp)
    losses, norms, depths, logits = [], [], [], []
    for step in range(layout.steps):
        losses.append(one_step(layout, config, chunks, optimizer, step))
        depths += mtp_runs.logged_losses(layout.mtp, layout.microbatches // layout.dp)
        updated, norm, _ = optimizer.step()
        assert updated
        norms.append(float(norm))
        if layout.qk_clip or layout.log_max_logit:
            logits.append(options.clip(chunks, log_only=not layout.qk_clip))
    kinds = {"loss": losses, "grad_norm": norms, "mtp": depths, "max_logit": logits}
    return {kind: numbers for kind, numbers in kinds.items() if numbers}


def parallel_sizes(layout: Layout) -> dict[str, Any]:
    """By Megatron's names."""
    names = {"tensor": "tp", "pipeline": "pp", "virtual_pipeline": "vpp", "expert": "ep"}
    sizes = {f"{name}_model_parallel_size": getattr(layout, x) for name, x in names.items()}
    return {**sizes, "context_parallel_size": layout.cp, "expert_tensor_parallel_size": 1}


def model_config(layout: Layout) -> TransformerConfig:
    recompute: dict[str, Any] = {}
    if layout.recompute == "full":
        recompute = dict(
            recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        )
    elif layout.recompute:
        recompute = dict(recompute_granularity="selective", recompute_modules=[layout.recompute])
    moe: dict[str, Any] = {}
    if layout.experts:
        moe = dict(
            num_moe_experts=layout.experts,
            moe_router_topk=2,
            moe_ffn_hidden_size=64,
            moe_token_dispatcher_type="alltoall",
            moe_router_load_balancing_type="none",
            moe_aux_loss_coeff=0.0,
        )
    latent: dict[str, Any] = {}
    if layout.latent:
        latent = dict(
            q_lora_rank=layout.q_lora_rank,
            kv_lora_rank=16,
            qk_head_dim=16,
            qk_pos_emb_head_dim=8,
            v_head_dim=12,
            qk_layernorm=layout.q_lora_rank is not None,  # 0.19 refuses a norm without a rank
            rope_type=layout.latent,
            rotary_scaling_factor=4.0,
            original_max_position_embeddings=48,
            mscale_all_dim=1.0,
        )
    kind = MLATransformerConfig if layout.latent else TransformerConfig
    return kind(
        num_layers=layout.num_layers,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=None if layout.latent else 2,
        ffn_hidden_size=128,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.1,
        sequence_parallel=layout.sp,
        overlap_p2p_comm=layout.vpp is not None and not layout.batched_p2p,
        batch_p2p_comm=layout.vpp is None or layout.batched_p2p,
        pipeline_dtype=torch.bfloat16 if layout.bf16 else torch.float32,
        calculate_per_token_loss=layout.per_token_loss,
        bf16=layout.bf16,
        params_dtype=torch.bfloat16 if layout.bf16 else torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        window_size=layout.window,
        window_attn_skip_freq=layout.window_skip,
        softmax_type=layout.softmax_type,
        qk_clip=layout.qk_clip is not None,
        log_max_attention_logit=layout.log_max_logit,
        qk_clip_threshold=layout.qk_clip or 100.0,
        mtp_num_layers=layout.mtp,
        mtp_loss_scaling_factor=0.5,
        **({"mtp_hsm": True} if layout.mtp_hsm else {}),
        **parallel_sizes(layout),
        **recompute,
        **moe,
        **latent,
        **(layout.settings or {}),
    )


def build_chunks(layout: Layout, config: TransformerConfig) -> list[torch.nn.Module]:
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    virtual = layout.vpp or 1
    models = []
    for stage in range(virtual):
        model = new_model(
            layout,
            config,
            pre_process=pp_rank == 0 and stage == 0,
            post_process=pp_rank == layout.pp - 1 and stage == virtual - 1,
            vp_stage=stage if layout.vpp else None,
        )
        models.append(model)
    init_by_name(models)
    options.set_sinks(models)
    state_runs.set_state_weights(models)
    if layout.attention == "stock" and layout.mtp:
        mtp_runs.stock_roll_respects_documents()
    if layout.attention == "magi":
        line = plugin.attach(models, magi_config(layout), layout.seq_length)
        assert f"cp {layout.cp}," in line, line
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=layout.distributed_optimizer,
        overlap_grad_reduce=layout.overlap,
        overlap_param_gather=layout.overlap and layout.distributed_optimizer,
        bucket_size=20000 if layout.overlap else None,
    )
    if layout.bf16:
        models = [Float16Module(config, model) for model in models]
    return [
        DistributedDataParallel(config, ddp, model, disable_bucketing=index > 0)
        for index, model in enumerate(models)
    ]


def new_model(layout: Layout, config: TransformerConfig, **stage: Any) -> torch.nn.Module:
    """A GPT or hybrid model."""
    settings = dict(
        config=config,
        vocab_size=VOCAB,
        max_sequence_length=layout.seq_length,
        share_embeddings_and_output_weights=layout.tied,
        position_embedding_type="rope",
        **stage,
    )
    if layout.layers == "hybrid":
        return state_runs.new_hybrid_model(layout, settings)
    spec: Any = layer_spec.llama_layer_spec(
        config, vp_stage=stage["vp_stage"], attention=layout.attention
    )
    if layout.layers == "te":
        spec = get_gpt_layer_with_transformer_engine_spec()
        spec = layer_spec.with_magi_attention(spec) if layout.attention == "magi" else spec
    elif layout.latent and layout.attention == "stock":
        spec = with_dense_attention(spec)
    mtp_spec = layer_spec.llama_mtp_spec(
        config, vp_stage=stage["vp_stage"], attention=layout.attention
    )
    return GPTModel(transformer_layer_spec=spec, mtp_block_spec=mtp_spec, **settings)


def connect(layout: Layout, config: Any, chunks: list[Any], optimizer: Any) -> None:
    """What a training loop sets on the config so that schedules find gradients and syncs."""
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if layout.overlap:
        config.no_sync_func = _per_chunk([c.no_sync for c in chunks])
        config.grad_sync_func = _per_chunk([c.start_grad_sync for c in chunks])
        if layout.distributed_optimizer:
            config.param_sync_func = _per_chunk([c.start_param_sync for c in chunks])


def _per_chunk(functions: list[Any]) -> Any:
    return functions if len(functions) > 1 else functions[0]


def magi_config(layout: Layout) -> MagiConfig:
    costs = CostTable(tile_q=layout.tile, tile_k=layout.tile)
    return MagiConfig(
        overlap_degree=layout.overlap_degree, chunk_size=layout.chunk_size, costs=costs
    )


def microbatch(layout: Layout, step: int, index: int) -> tuple[rank_batch.Batch, list[int]]:
    """Tokens, shifted labels and loss mask of a packed stream of documents of uneven lengths."""
    rng = np.random.default_rng([7, step, index])
    length = layout.seq_length
    cuts = np.sort(
        rng.choice(np.arange(3, length - 3), size=int(rng.integers(1, 5)), replace=False)
    )
    bounds = [0, *cuts.tolist(), length] if layout.packed else [0, length]
    tokens = rng.integers(0, VOCAB, size=length + 1)
    loss_mask = np.ones(length, dtype=np.float32)
    loss_mask[np.array(bounds[1:]) - 1] = 0.0
    loss_mask[: bounds[1] // 3] = 0.0
    loss_mask[length - length // 4 :] = 0.0
    positions = np.arange(length)
    rows = [torch.from_numpy(x)[None] for x in (tokens[:-1], tokens[1:], loss_mask, positions)]
    return rank_batch.Batch(*rows), bounds


def microbatches(layout: Layout, step: int) -> list[tuple[rank_batch.Batch, list[int]]]:
    """Those of this data-parallel replica."""
    per_rank = layout.microbatches // layout.dp
    first = parallel_state.get_data_parallel_rank() * per_rank
    found = [microbatch(layout, step, index) for index in range(first, first + per_rank)]
    return state_runs.documents_alone(found) if layout.by_document else found


def local_batch(
    layout: Layout, config: Any, given: tuple[rank_batch.Batch, list[int]], model: Any
) -> rank_batch.LocalBatch:
    rows, bounds = given
    if layout.attention == "stock":
        mtp_runs.documents[:] = bounds
        return dense_batch(rows, bounds)
    if layout.moved_boundary or layout.moved_boundary_rank == torch.distributed.get_rank():
        bounds[1] += 1
    if layout.empty_documents:
        bounds = sorted([*bounds, bounds[1], bounds[-1]])
    cp_group = parallel_state.get_context_parallel_group()
    mask = builders.from_cu_seqlens(bounds)
    if not layout.restart_positions:
        bounds = [0, bounds[-1]]
    params = packed.make_packed_seq_params(
        bounds,
        config,
        cp_group,
        magi_config=magi_config(layout),
        mask="causal" if layout.restart_positions else mask,
    )
    if layout.damage:
        getattr(state_runs, layout.damage)(params)
    (chunk,) = model_chunks(model)
    has_data = chunk.pre_process or chunk.post_process
    return rank_batch.dispatch_batch(rows if has_data else None, params, cp_group)


def one_step(layout: Layout, config: Any, chunks: list[Any], optimizer: Any, step: int) -> float:
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    given = microbatches(layout, step)

    def forward_step(iterator: Any, model: Any) -> Any:
        local = local_batch(layout, config, next(iterator), model)
        inputs = local.model_inputs()
        if not layout.loss_mask_to_model:
            del inputs["loss_mask"]
        return model(**inputs), partial(loss.per_token_loss, local.loss_mask)

    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(given) for _ in chunks],
        model=chunks,
        num_microbatches=len(given),
        seq_length=packed.pipeline_seq_length(layout.seq_length, config, magi_config(layout)),
        micro_batch_size=1,
        forward_only=False,
    )
    pipeline_agreement.finish_pipeline_agreement()
    total = torch.zeros(2)
    for report in reports:
        total += report["lm loss"]
    # Only the last stage has reports; the sum over all ranks counts each TP rank's copy alike.
    torch.distributed.all_reduce(total)
    return float(total[0] / total[1])
