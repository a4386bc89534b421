"""A Llama that Bridge trains in seconds on the CPU, as a recipe would give it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig
from megatron.bridge.data.packing.config import PackedSequenceSpecs
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

LENGTH = 96
NUM_SAMPLES = 8


def tiny_config(packed: bool) -> ConfigContainer:
    """Four steps of two microbatches in fp32."""
    return ConfigContainer(
        model=GPTModelProvider(
            num_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            num_query_groups=2,
            ffn_hidden_size=128,
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
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            apply_rope_fusion=False,
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            persist_layer_norm=False,
            params_dtype=torch.float32,
            pipeline_dtype=torch.float32,
        ),
        train=TrainingConfig(train_iters=4, global_batch_size=2, micro_batch_size=1),
        validation=ValidationConfig(eval_interval=1000, eval_iters=0),
        optimizer=OptimizerConfig(
            optimizer="adam",
            lr=3e-3,
            min_lr=3e-3,
            weight_decay=0.0,
            clip_grad=1.0,
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
        dataset=_packed() if packed else _mock(),
        logger=LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=127),
        checkpoint=CheckpointConfig(),
        dist=DistributedInitConfig(distributed_backend="gloo"),
    )


def _mock() -> MockGPTDatasetConfig:
    return MockGPTDatasetConfig(
        seq_length=LENGTH,
        random_seed=1234,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        num_workers=0,
        dataloader_type="single",
        split="9,1,0",
    )


def _packed() -> GPTSFTDatasetConfig:
    """Documents of uneven lengths that Bridge reads as packed samples of at most LENGTH tokens."""
    folder = Path(tempfile.mkdtemp())
    generator = np.random.default_rng(5)
    samples = []
    for _ in range(NUM_SAMPLES):
        starts = [0, *sorted(generator.choice(np.arange(4, LENGTH - 8), 4, replace=False).tolist())]
        tokens = generator.integers(0, 126, LENGTH).tolist()
        mask = (generator.random(LENGTH) < 0.7).astype(int).tolist()
        samples.append({"input_ids": tokens, "seq_start_id": starts, "loss_mask": mask})
    (folder / "metadata.json").write_text("[]")
    np.save(folder / "packed.npy", np.array(samples, dtype=object), allow_pickle=True)
    return GPTSFTDatasetConfig(
        seq_length=LENGTH,
        dataset_root=folder,
        enable_offline_packing=True,
        offline_packing_specs=PackedSequenceSpecs(
            packed_sequence_size=LENGTH,
            packed_train_data_path=folder / "packed.npy",
            packed_metadata_path=folder / "metadata.json",
        ),
        dataset_kwargs={"pad_to_max_length": True},
        do_validation=False,
        do_test=False,
        num_workers=0,
    )
