"""Megatron's Adam and its learning-rate schedule, from a run config."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import (
    OptimizerConfig as MegatronOptimizerConfig,
)
from megatron.core.optimizer import (
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_magi.adapter.adam_state import choose_update
from megatron_magi.training.recipe.config import RunConfig


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
