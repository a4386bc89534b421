"""Generated jobs of a tiny model: `megatron-magi check` judges each, and each is started.

The seed of a variant is its number, so a failing one is found again by it.
"""

from __future__ import annotations

import random
from typing import Any

from tests.launcher.layouts import MLA, MOE, SEQ_AUX, YARN, Flags

ONE_STEP: Flags = {"train-iters": 1, "log-interval": 1}

WORLDS = [1, 1, 1, 1, 2, 2, 2, 4]
"""Most jobs are of one process, because starting a process costs most."""

SIZES = {
    "tensor-model-parallel-size": [1, 1, 1, 2, 3],
    "pipeline-model-parallel-size": [1, 1, 1, 1, 2],
    "context-parallel-size": [1, 1, 1, 2, 2, 0],
    "expert-model-parallel-size": [1, 1, 1, 1, 2, 4],
    "expert-tensor-parallel-size": [None, None, None, 1, 2],
}
"""Values of the parallel sizes; a value that stands more than once comes up more often."""

CHANGES: list[Flags] = [
    {"num-attention-heads": 6},
    {"num-attention-heads": 8, "num-query-groups": 4},
    {"num-query-groups": 3},
    {"num-query-groups": 1},
    {"group-query-attention": None},
    {"group-query-attention": None, "num-query-groups": None},
    {"kv-channels": 24},
    {"hidden-size": 66},
    {"hidden-size": None},
    {"num-layers": 3},
    {"num-layers": 4, "num-layers-per-virtual-pipeline-stage": 1},
    {"num-layers": 4, "num-virtual-stages-per-pipeline-rank": 2},
    {"num-layers": None},
    {"seq-length": 97},
    {"seq-length": 33},
    {"seq-length": None},
    {"seq-length": 128, "max-position-embeddings": 64},
    {"max-position-embeddings": None},
    {"micro-batch-size": 2},
    {"micro-batch-size": None},
    {"micro-batch-size": 2, "global-batch-size": 3},
    {"global-batch-size": 4},
    {"global-batch-size": None},
    {"rampup-batch-size": ["2", "2", "8"], "global-batch-size": 4},
    {"train-iters": None},
    {"train-iters": None, "train-samples": 4},
    {"train-samples": 4},
    {"mock-data": None},
    {"data-path": ["no", "data"]},
    {"vocab-size": None},
    {"tokenizer-type": None},
    {"tokenizer-type": "HuggingFaceTokenizer"},
    {"tokenizer-type": "GPT2BPETokenizer"},
    {"lr": None},
    {"min-lr": 1.0},
    {"lr-warmup-iters": 5},
    {"lr-warmup-samples": 5},
    {"lr-decay-style": "WSD"},
    {"attention-dropout": 0.1},
    {"attention-dropout": None},
    {"hidden-dropout": 0.1},
    {"bf16": True},
    {"fp16": True},
    {"bf16": True, "fp16": True},
    {"sequence-parallel": True},
    {"use-distributed-optimizer": True},
    {"use-distributed-optimizer": True, "overlap-grad-reduce": True, "overlap-param-gather": True},
    {"overlap-param-gather": True},
    {"recompute-activations": True},
    {"recompute-granularity": "full"},
    {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1},
    {"recompute-granularity": "selective", "recompute-modules": ["mlp"]},
    {"position-embedding-type": "learned_absolute"},
    {"position-embedding-type": "none"},
    {"position-embedding-type": "relative"},
    {"position-embedding-type": "mrope"},
    {"transformer-impl": "transformer_engine"},
    {"transformer-impl": "inference_optimized"},
    {"normalization": "LayerNorm"},
    {"normalization": "LayerNorm", "disable-bias-linear": None},
    {"qk-layernorm": True},
    {"window-size": "17,0"},
    {"softmax-type": "learnable"},
    {"magi-chunk-size": 16},
    {"magi-chunk-size": 400},
    {"magi-kernel": "cuda"},
    {"magi-kernel": "reference", "magi-deterministic": True},
    {"magi-transport": "symm_mem"},
    {"magi-mask": "video_mask:frames"},
    {"mtp-num-layers": 1},
    {"untie-embeddings-and-output-weights": None},
    {"dataloader-inter-document-masking": True},
    {"reset-attention-mask": True, "reset-position-ids": True},
    {"calculate-per-token-loss": True},
    {"deterministic-mode": True},
    {"clip-grad": 0.0},
    {"make-vocab-size-divisible-by": 7},
    {"squared-relu": True},
    {"expert-model-parallel-size": 2},
    YARN,
    MLA,
    {**MLA, "v-head-dim": 16},
    {**MLA, "num-query-groups": 2, "group-query-attention": True},
    {**MLA, "q-lora-rank": None},
    {**MLA, "sequence-parallel": True},
    MOE,
    MOE,
    SEQ_AUX,
    {**MOE, "moe-router-topk": 5},
    {**MOE, "num-experts": 3},
    {**MOE, "moe-grouped-gemm": True},
    {**MOE, "moe-token-dispatcher-type": "alltoall"},
    {**MOE, "moe-token-dispatcher-type": "alltoall", "sequence-parallel": True},
    {**MOE, "disable-bias-linear": None},
    {**MOE, "moe-shared-expert-intermediate-size": 32},
]
"""What is changed in TINY; None takes a flag away."""


def variant(number: int) -> dict[str, Any]:
    """{"flags": over TINY, "world": processes}; its world fits the dense layers at least often."""
    draw = random.Random(number)
    flags: Flags = {**ONE_STEP, "attention-backend": "magi"}
    for change in draw.sample(CHANGES, draw.choice([1, 1, 2, 2, 3])):
        flags |= change
    world = draw.choice(WORLDS)
    experts = flags.get("num-experts")
    for name, values in SIZES.items():
        size = draw.choice(values)
        is_needless = "expert" in name and not experts
        if size not in (1, None) and not is_needless and (world > 1 or draw.random() < 0.05):
            flags[name] = size
    return {"flags": flags, "world": world}
