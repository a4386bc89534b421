"""Builds Megatron's GPTModel chunks, in its data parallelism, and their optimizer."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import (
    OptimizerConfig as MegatronOptimizerConfig,
)
from megatron.core.optimizer import (
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from megatron_magi.adapter.adam_state import choose_update
from megatron_magi.adapter.fused.parts import choose_parts
from megatron_magi.adapter.init import init_by_name
from megatron_magi.adapter.layer_spec import llama_layer_spec, with_fused_attention
from megatron_magi.adapter.plugin import attach
from megatron_magi.training.recipe.run_config import RunConfig
from megatron_magi.training.run.baseline_layers import KINDS, plain_layer_spec

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "attention": {"recompute_granularity": "selective"},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


def transformer_config(config: RunConfig) -> TransformerConfig:
    """Megatron's model configuration of a run."""
    m, p, bf16 = config.model, config.parallel, config.train.dtype == "bf16"
    return TransformerConfig(
        num_layers=m.num_layers,
        hidden_size=m.hidden_size,
        ffn_hidden_size=m.ffn_hidden_size,
        num_attention_heads=m.num_attention_heads,
        num_query_groups=m.num_query_groups,
        kv_channels=m.kv_channels,
        normalization="RMSNorm",
        layernorm_epsilon=m.norm_epsilon,
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        bias_dropout_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=m.init_std,
        tensor_model_parallel_size=p.tp,
        pipeline_model_parallel_size=p.pp,
        virtual_pipeline_model_parallel_size=p.vpp,
        context_parallel_size=p.cp,
        sequence_parallel=p.sequence_parallel,
        # Megatron pairs batched sends between two stages with virtual stages wrongly.
        overlap_p2p_comm=p.vpp is not None,
        batch_p2p_comm=p.vpp is None,
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        bf16=bf16,
        calculate_per_token_loss=True,
        use_cpu_initialization=not torch.cuda.is_available(),
        masked_softmax_fusion=False,
        **RECOMPUTE[config.train.recompute],
        **choose_parts(m.fused).config_fields(),
    )


def build_model(config: RunConfig, model_config: TransformerConfig) -> list[Any]:
    """Model chunks of this rank (one, or vpp of them), weights drawn by parameter name.

    Each is a Megatron DistributedDataParallel around a GPTModel.
    """
    choose_parts(config.model.fused).install()
    stages = [None] if config.parallel.vpp is None else range(config.parallel.vpp)
    model_chunks = [_gpt_model(config, model_config, stage) for stage in stages]
    init_by_name(model_chunks, config.train.seed, config.model.init_std)
    if config.attention == "magi":
        attach(model_chunks, config.magi, config.data.seq_length)  # logs what runs, or raises
    if torch.cuda.is_available():
        model_chunks = [chunk.cuda() for chunk in model_chunks]
    if model_config.bf16:
        model_chunks = [Float16Module(model_config, chunk) for chunk in model_chunks]
    chunks = [
        DistributedDataParallel(model_config, ddp_config(config), chunk, disable_bucketing=i > 0)
        for i, chunk in enumerate(model_chunks)
    ]
    _connect_schedule(config, model_config, chunks)
    return chunks


def undrawn_model(config: RunConfig, dtype: torch.dtype) -> GPTModel:
    """The whole model on the CPU without drawn weights, for a conversion to fill."""
    model_config = transformer_config(config)
    model_config.params_dtype = dtype
    model_config.perform_initialization = False
    model_config.use_cpu_initialization = True
    return _gpt_model(config, model_config, None)


def ddp_config(config: RunConfig) -> DistributedDataParallelConfig:
    """How gradients are reduced."""
    p = config.parallel
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=p.overlap_grad_reduce,
        overlap_param_gather=p.overlap_param_gather,
        use_distributed_optimizer=p.distributed_optimizer,
    )


def _gpt_model(config: RunConfig, model_config: TransformerConfig, stage: int | None) -> GPTModel:
    m = config.model
    at = {"ignore_virtual": False, "vp_stage": stage}
    return _model_class(config)(
        config=model_config,
        transformer_layer_spec=_layer_spec(config, model_config, stage),
        vocab_size=m.padded_vocab_size,
        max_sequence_length=config.data.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(**at),
        post_process=parallel_state.is_pipeline_last_stage(**at),
        share_embeddings_and_output_weights=m.tie_embeddings,
        position_embedding_type="rope",
        rotary_base=m.rotary_base,
        rope_scaling=m.rope_scaling,
        rope_scaling_factor=m.rope_scaling_factor,
        vp_stage=stage,
    )


def _model_class(config: RunConfig) -> type[GPTModel]:
    """The fused loss needs Triton, so it is imported where it is used."""
    if choose_parts(config.model.fused).cross_entropy != "triton":
        return GPTModel
    from megatron_magi.adapter.fused.cross_entropy import FusedLossGPTModel

    return FusedLossGPTModel


def _layer_spec(config: RunConfig, model_config: TransformerConfig, stage: int | None) -> Any:
    if config.attention in KINDS:
        spec = plain_layer_spec(model_config, config.attention, stage)
    else:
        kind: Any = "magi" if config.attention == "magi" else "stock"
        spec = llama_layer_spec(model_config, vp_stage=stage, attention=kind)
    is_fused = choose_parts(config.model.fused).qkv_rope == "triton"
    return with_fused_attention(spec) if is_fused else spec


def _connect_schedule(config: RunConfig, model_config: Any, chunks: list[Any]) -> None:
    """Tell Megatron's schedules how to finish, delay and overlap gradient reduction."""
    single = len(chunks) == 1

    def of_chunks(name: str) -> Any:
        return getattr(chunks[0], name) if single else [getattr(c, name) for c in chunks]

    model_config.finalize_model_grads_func = finalize_model_grads
    model_config.no_sync_func = of_chunks("no_sync")
    if config.parallel.overlap_grad_reduce and config.parallel.pp > 1:
        model_config.grad_sync_func = of_chunks("start_grad_sync")
    if config.parallel.overlap_param_gather and config.parallel.pp > 1:
        model_config.param_sync_func = of_chunks("start_param_sync")


def build_optimizer(config: RunConfig, chunks: list[Any]) -> tuple[Any, OptimizerParamScheduler]:
    """Optimizer over all chunks (no weight decay on norms and biases) and its schedule.

    The schedule counts iterations: step it by 1.
    """
    o, bf16 = config.optimizer, config.train.dtype == "bf16"
    megatron_config = MegatronOptimizerConfig(
        optimizer="adam",
        lr=o.lr,
        min_lr=o.min_lr,
        adam_beta1=o.beta1,
        adam_beta2=o.beta2,
        adam_eps=o.eps,
        weight_decay=o.weight_decay,
        clip_grad=o.clip_grad,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=config.parallel.distributed_optimizer,
        overlap_param_gather=config.parallel.overlap_param_gather,
    )
    overrides = get_standard_config_overrides(megatron_config)
    optimizer = get_megatron_optimizer(megatron_config, chunks, config_overrides=overrides)
    choose_update(optimizer)
    decay = o.decay_iters or config.train.iterations
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=o.lr,
        min_lr=o.min_lr,
        lr_warmup_steps=o.warmup_iters,
        lr_decay_steps=decay,
        lr_decay_style=o.decay_style,
        start_wd=o.weight_decay,
        end_wd=o.weight_decay,
        wd_incr_steps=decay,
        wd_incr_style="constant",
        # A resumed run follows its recipe, not the recipe that saved the checkpoint.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    return optimizer, scheduler
