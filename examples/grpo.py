#!/usr/bin/env python3
"""Policy gradients of many answers to one prompt, which is computed once, on `megatron.core`.

    python examples/grpo.py                                         # one process
    torchrun --nproc-per-node 4 examples/grpo.py --cp 4 --answers 64
    python examples/grpo.py --check                # against every answer packed with its own prompt

A group of answers is a tree: the prompt, and one leaf for each answer. Lines for this plugin are
marked `# magi`. It needs no GPU: without one it runs over gloo.
"""

import argparse
import os

import torch
import torch.distributed as dist

import megatron_magi as magi  # magi
from megatron_magi.adapter.cpu import install_cpu_runtime  # magi
from megatron_magi.adapter.layer_spec import llama_layer_spec  # magi
from megatron_magi.adapter.packed import make_packed_seq_params  # magi
from megatron_magi.adapter.plugin import attach  # magi
from megatron_magi.adapter.rank_batch import Batch, dispatch_batch  # magi
from megatron_magi.adapter.tree_logprobs import tree_logprobs  # magi

# The adapter comes first, because it prepares the import of megatron.core.
# isort: split
from init_by_name import init_by_name  # equal weights at every layout
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

PROMPT, VOCAB = 96, 128
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
    )
    init_by_name(model)  # magi
    attach(model)  # magi
    return model.to(DEVICE)


def rollouts(count: int) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """(prompt, answers, advantage of each answer): random ones in place of a sampler's."""
    random = torch.Generator().manual_seed(7)
    prompt = torch.randint(0, VOCAB, (PROMPT,), generator=random)
    lengths = torch.randint(3, 40, (count,), generator=random).tolist()
    answers = [torch.randint(0, VOCAB, (length,), generator=random) for length in lengths]
    rewards = torch.rand(count, generator=random)
    return prompt, answers, (rewards - rewards.mean()) / rewards.std()


def answer_logprobs(model, config, prompt, answers):
    """[answers]: mean log-probability of the tokens of each answer, equal on every rank."""
    tree = magi.PrefixTree.of_answers(len(prompt), [len(a) for a in answers])  # magi
    tokens = torch.cat([prompt, *answers]).to(DEVICE)
    cp_group = parallel_state.get_context_parallel_group()
    packed = make_packed_seq_params(  # magi: the plan, with positions along each branch
        [0, tree.total_seqlen], config, cp_group, mask=tree
    )
    local = dispatch_batch(Batch(tokens=tokens[None]), packed, cp_group)  # magi: this rank's rows
    logits = model(**local.model_inputs())
    edges = magi.tree_edges(tree, packed.token_plan, cp_group, DEVICE)  # magi
    logprobs = tree_logprobs(logits, tokens, edges)  # magi: of every token after its prefix
    # The prompt has no loss. An answer's tokens share its mean.
    weights = torch.cat([torch.zeros(len(prompt)), *(torch.full_like(a, 1).float() / len(a)
                                                     for a in answers)])  # fmt: skip
    weighted = logprobs * weights.to(DEVICE)[edges.targets]
    return magi.sum_by_branch(weighted, edges, tree, cp_group)  # magi


def packed_logprobs(model, config, prompt, answers):
    """The same from every answer as a document of its own that repeats the prompt."""
    found = [answer_logprobs(model, config, prompt, [answer]) for answer in answers]
    return torch.cat(found)


def gradients(model, config, logprobs, prompt, answers, advantages) -> tuple[float, list]:
    """(loss, gradients) of the policy: answers better than the mean become likelier."""
    model.zero_grad()
    loss = -(logprobs(model, config, prompt, answers) * advantages.to(DEVICE)).mean()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=parallel_state.get_context_parallel_group())
    return float(loss.detach()), [p.grad.float().clone() for p in model.parameters()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks")
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--check", action="store_true", help="compare with packed answers")
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
    prompt, answers, advantages = rollouts(options.answers)
    loss, shared = gradients(model, config, answer_logprobs, prompt, answers, advantages)
    rows = PROMPT + sum(map(len, answers))
    packed_rows = PROMPT * len(answers) + sum(map(len, answers))
    if dist.get_rank() == 0:
        print(f"loss {loss:.6f} of {len(answers)} answers in {rows:,} rows; packed they have "
              f"{packed_rows:,}", flush=True)  # fmt: skip
    if options.check:
        packed_loss, packed = gradients(model, config, packed_logprobs, prompt, answers, advantages)
        error = max(float((a - b).norm() / b.norm()) for a, b in zip(shared, packed, strict=True))
        if dist.get_rank() == 0:
            print(f"packed: loss {packed_loss:.6f}, largest gradient error {error:.1e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
