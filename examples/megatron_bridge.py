#!/usr/bin/env python3
"""Megatron-Bridge's own pretrain with our attention: one call, everything else is Bridge's.

    torchrun --nproc-per-node 2 examples/megatron_bridge.py --cp 2

It trains a small Llama on mock data for four steps, and prints the loss of each. With a recipe of
Bridge in place of `small_config()` the rest stays:

    from megatron.bridge.recipes.llama import llama3_8b_64k_pretrain_config
    config = llama3_8b_64k_pretrain_config()

Without a GPU it runs over gloo, if TransformerEngine can be imported, which Bridge requires.
"""

import argparse

import torch

from megatron_magi.bridge import use_magi
from megatron_magi.bridge.cpu import install_cpu_bridge

# Ours come first, because they prepare the import of megatron.core.
# isort: split
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    LoggerConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain

LENGTH = 96


def small_llama(on_gpu: bool) -> GPTModelProvider:
    """Two layers, with the fused parts of a GPU where there is one."""
    dtype = torch.bfloat16 if on_gpu else torch.float32
    return GPTModelProvider(
        num_layers=2,
        hidden_size=64 if not on_gpu else 512,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=128 if not on_gpu else 1024,
        seq_length=LENGTH,
        vocab_size=128,
        should_pad_vocab=True,
        make_vocab_size_divisible_by=64,
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        init_method_std=0.1,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=on_gpu,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=not on_gpu,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=on_gpu,
        masked_softmax_fusion=False,
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        persist_layer_norm=on_gpu,
    )


def small_config(on_gpu: bool) -> ConfigContainer:
    """Four steps of two microbatches on mock data."""
    return ConfigContainer(
        model=small_llama(on_gpu),
        train=TrainingConfig(train_iters=4, global_batch_size=2, micro_batch_size=1),
        validation=ValidationConfig(eval_interval=1000, eval_iters=0),
        optimizer=OptimizerConfig(
            optimizer="adam",
            lr=3e-3,
            min_lr=3e-3,
            weight_decay=0.0,
            clip_grad=1.0,
            bf16=on_gpu,
            use_distributed_optimizer=False,
        ),
        scheduler=SchedulerConfig(
            lr_decay_style="constant",
            lr_warmup_iters=0,
            start_weight_decay=0.0,
            end_weight_decay=0.0,
        ),
        ddp=DistributedDataParallelConfig(
            use_distributed_optimizer=False, average_in_collective=True, overlap_grad_reduce=False
        ),
        dataset=MockGPTDatasetConfig(
            seq_length=LENGTH,
            random_seed=1234,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            num_workers=0,
            dataloader_type="single",
            split="9,1,0",
        ),
        logger=LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=127),
        checkpoint=CheckpointConfig(),
        dist=DistributedInitConfig(distributed_backend="nccl" if on_gpu else "gloo"),
    )


def main() -> None:
    """Train under torchrun."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cp", type=int, default=1, help="context-parallel size")
    cp_size = parser.parse_args().cp

    install_cpu_bridge()  # does nothing where CUDA is available
    config = small_config(torch.cuda.is_available())
    config.model.context_parallel_size = cp_size
    use_magi(config)
    pretrain(config, forward_step)


if __name__ == "__main__":
    main()
