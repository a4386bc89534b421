#!/usr/bin/env python3
"""A whole training script of one's own on `megatron.core`, with any number of context ranks.

    torchrun --nproc-per-node 2 examples/own_loop.py --cp 2
    python examples/own_loop.py                                   # one process

Ranks beyond --cp are data parallel. It needs no GPU: without one it trains over gloo. Lines for
this plugin are marked `# magi`; the rest is what any loop on megatron.core has.
"""

import argparse
import os
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from megatron_magi.adapter.cpu import install_cpu_runtime  # magi
from megatron_magi.adapter.layer_spec import llama_layer_spec  # magi
from megatron_magi.adapter.loss import per_token_loss  # magi
from megatron_magi.adapter.packed import make_packed_seq_params, pipeline_seq_length  # magi
from megatron_magi.adapter.pipeline_agreement import finish_pipeline_agreement  # magi
from megatron_magi.adapter.plugin import attach  # magi
from megatron_magi.adapter.rank_batch import Batch, dispatch_batch  # magi

# The adapter comes first, because it prepares the import of megatron.core.
# isort: split
from init_by_name import init_by_name  # equal weights at every layout
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

LENGTH, VOCAB, GLOBAL_BATCH = 251, 128, 4  # any length works, also a prime
ON_GPU = torch.cuda.is_available()
DTYPE = torch.bfloat16 if ON_GPU else torch.float32


def model_config(cp_size: int) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=256,
        num_attention_heads=4,  # of 64
        num_query_groups=2,
        ffn_hidden_size=512,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_dropout_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        context_parallel_size=cp_size,
        calculate_per_token_loss=True,  # magi: ranks hold different numbers of counted tokens
        params_dtype=DTYPE,
        pipeline_dtype=DTYPE,
        bf16=ON_GPU,
        use_cpu_initialization=not ON_GPU,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
    )


def build_model(config: TransformerConfig) -> DistributedDataParallel:
    model = GPTModel(
        config=config,
        transformer_layer_spec=llama_layer_spec(config),  # magi: or with_magi_attention(any spec)
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
    )
    init_by_name(model)  # magi
    attach(model)  # magi: checks every layer, prints one line about what will run
    if ON_GPU:
        model = Float16Module(config, model.cuda())
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = model.no_sync
    return model


def packed_sample(step: int, index: int) -> tuple[Batch, list[int]]:
    """One stream of documents, each counting up from a random token, and their boundaries."""
    rng = np.random.default_rng([step, index])
    cuts = np.sort(rng.choice(np.arange(1, LENGTH), size=5, replace=False))
    bounds = [0, *cuts.tolist(), LENGTH]
    lengths = np.diff(bounds)
    starts = rng.integers(0, VOCAB, len(lengths))
    rows = np.concatenate([s + np.arange(n) for s, n in zip(starts, lengths, strict=True)]) % VOCAB
    labels = np.roll(rows, -1)  # shifted here, in the order of the stream
    counted = np.ones(LENGTH, dtype=np.float32)
    counted[np.array(bounds[1:]) - 1] = 0  # a document's last token has no next one
    tensors = [torch.from_numpy(x)[None] for x in (rows, labels, counted)]
    return Batch(*(x.cuda() if ON_GPU else x for x in tensors)), bounds


def forward_step(samples, model, *, config):
    batch, bounds = next(samples)  # the whole stream, on every context-parallel rank
    cp_group = parallel_state.get_context_parallel_group()
    packed = make_packed_seq_params(bounds, config, cp_group)  # magi: the plan
    local = dispatch_batch(batch, packed, cp_group)  # magi: this rank's rows
    return model(**local.model_inputs()), partial(per_token_loss, local.loss_mask)


def train_step(model, optimizer, config: TransformerConfig, step: int) -> float:
    """The loss per counted token of the global batch, equal on every rank."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    first = parallel_state.get_data_parallel_rank()
    mine = range(first, GLOBAL_BATCH, parallel_state.get_data_parallel_world_size())
    reports = get_forward_backward_func()(
        forward_step_func=partial(forward_step, config=config),
        data_iterator=(packed_sample(step, index) for index in mine),
        model=model,
        num_microbatches=len(mine),
        seq_length=pipeline_seq_length(LENGTH, config),  # magi: padded as the plan pads it
        micro_batch_size=1,
        forward_only=False,
    )
    finish_pipeline_agreement()  # magi: before a gradient is used
    optimizer.step()
    total = torch.stack([report["lm loss"] for report in reports]).sum(0)
    dist.all_reduce(total)
    return float(total[0] / total[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    if options.cp < 1:
        parser.exit(2, f"error: --cp must be at least 1, got {options.cp}; pass the number of "
                    f"context-parallel ranks\n")  # fmt: skip
    is_alone = "LOCAL_RANK" not in os.environ
    if is_alone and options.cp > 1:
        parser.exit(2, f"error: --cp {options.cp} needs a multiple of {options.cp} processes, got "
                    f"one; start it with torchrun --nproc-per-node {options.cp}\n")  # fmt: skip
    data_ranks = int(os.environ.get("WORLD_SIZE", 1)) // options.cp
    if data_ranks > GLOBAL_BATCH:
        parser.exit(2, f"error: at most {GLOBAL_BATCH} data-parallel ranks have a sample each, got "
                    f"{data_ranks}; start fewer processes, or pass a larger --cp\n")  # fmt: skip
    install_cpu_runtime()  # magi: does nothing where CUDA is available
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    one = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if is_alone else {}
    dist.init_process_group("nccl" if ON_GPU else "gloo", **one)
    parallel_state.initialize_model_parallel(context_parallel_size=options.cp)
    model_parallel_cuda_manual_seed(1)
    config = model_config(options.cp)
    model = build_model(config)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=1e-3, clip_grad=1.0, bf16=ON_GPU, params_dtype=DTYPE), [model]
    )
    for step in range(options.steps):
        loss = train_step(model, optimizer, config, step)
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
