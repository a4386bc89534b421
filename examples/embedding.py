#!/usr/bin/env python3
"""An embedding model on packed documents that tokens see in both directions, on `megatron.core`.

    python examples/embedding.py                                    # one process
    torchrun --nproc-per-node 2 examples/embedding.py --cp 2 --pooling last

A step packs pairs of a query and its passage. Each document becomes one vector, pooled on the ranks
that hold its tokens. The loss makes a query more like its own passage than like all others. Lines
for this plugin are marked `# magi`. It needs no GPU: without one it runs over gloo.
"""

import argparse
import os

import torch
import torch.distributed as dist

from megatron_magi.adapter.cpu import install_cpu_runtime  # magi
from megatron_magi.adapter.document_pool import pool_documents  # magi
from megatron_magi.adapter.layer_spec import llama_layer_spec  # magi
from megatron_magi.adapter.packed import make_packed_seq_params  # magi
from megatron_magi.adapter.plugin import attach  # magi
from megatron_magi.adapter.rank_batch import Batch, dispatch_batch  # magi

# The adapter comes first, because it prepares the import of megatron.core.
# isort: split
from init_by_name import init_by_name  # equal weights at every layout
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

PAIRS, VOCAB, TEMPERATURE = 8, 128, 0.5
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
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
        params_dtype=DTYPE,
        bf16=ON_GPU,
        use_cpu_initialization=not ON_GPU,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        calculate_per_token_loss=True,
    )


def build_model(config: TransformerConfig) -> GPTModel:
    model = GPTModel(
        config=config,
        transformer_layer_spec=llama_layer_spec(config),  # magi
        vocab_size=VOCAB,
        max_sequence_length=4096,
        position_embedding_type="rope",
        post_process=False,  # hidden states in place of logits, without the last norm
    )
    init_by_name(model)  # magi
    attach(model)  # magi
    return model.to(DEVICE)


def pairs(step: int) -> list[torch.Tensor]:
    """PAIRS queries, then their passages, which repeat the query's tokens among random ones."""
    random = torch.Generator().manual_seed(step)
    lengths = torch.randint(3, 60, (PAIRS, 2), generator=random).tolist()
    queries = [torch.randint(0, VOCAB, (n,), generator=random) for n, _ in lengths]
    noise = [torch.randint(0, VOCAB, (n,), generator=random) for _, n in lengths]
    return [*queries, *(torch.cat(both) for both in zip(noise, queries, strict=True))]


def embed(model, config, documents, pooling):
    """fp32 [documents, hidden size] of length 1, equal on every context-parallel rank."""
    bounds = torch.tensor([0, *map(len, documents)]).cumsum(0)
    tokens = torch.cat(documents).to(DEVICE)
    cp_group = parallel_state.get_context_parallel_group()
    packed = make_packed_seq_params(bounds, config, cp_group, mask="full")  # magi: the plan
    local = dispatch_batch(Batch(tokens=tokens[None]), packed, cp_group)  # magi: this rank's rows
    hidden = model(**local.model_inputs())
    pooled = pool_documents(hidden, packed, pooling)  # magi
    return torch.nn.functional.normalize(pooled, dim=1)


def train_step(model, optimizer, config, documents, pooling) -> tuple[float, float]:
    """(loss, norm of the gradient), both before the step."""
    optimizer.zero_grad()
    queries, passages = embed(model, config, documents, pooling).split(PAIRS)
    likeness = queries @ passages.T / TEMPERATURE
    loss = torch.nn.functional.cross_entropy(likeness, torch.arange(PAIRS, device=DEVICE))
    loss.backward()
    for parameter in model.parameters():  # a rank has the share of its own rows
        dist.all_reduce(parameter.grad, group=parallel_state.get_context_parallel_group())
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    optimizer.step()
    return float(loss.detach()), float(norm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--pooling", choices=("mean", "last"), default="mean")
    options = parser.parse_args()
    is_alone = "LOCAL_RANK" not in os.environ
    one = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if is_alone else {}
    if ON_GPU:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    install_cpu_runtime()  # magi: nothing where there is CUDA
    dist.init_process_group("nccl" if ON_GPU else "gloo", **one)
    parallel_state.initialize_model_parallel(context_parallel_size=options.cp)
    model_parallel_cuda_manual_seed(1)
    config = model_config(options.cp)
    model = build_model(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(options.steps):
        loss, norm = train_step(model, optimizer, config, pairs(step), options.pooling)
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss:.6f}, gradient norm {norm:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
