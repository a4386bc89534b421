"""Flags of a pretrain script with which it trains on the CPU in seconds."""

from __future__ import annotations

TINY = {
    "num-layers": 2,
    "hidden-size": 64,
    "num-attention-heads": 4,
    "group-query-attention": True,
    "num-query-groups": 2,
    "ffn-hidden-size": 128,
    "seq-length": 96,
    "max-position-embeddings": 4096,
    "micro-batch-size": 1,
    "global-batch-size": 2,
    "train-iters": 4,
    "lr": 3e-3,
    "lr-decay-style": "constant",
    "clip-grad": 1.0,
    "weight-decay": 0.0,
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable-bias-linear": True,
    "untie-embeddings-and-output-weights": True,
    "position-embedding-type": "rope",
    "init-method-std": 0.1,
    "attention-dropout": 0,
    "hidden-dropout": 0,
    "transformer-impl": "local",
    "distributed-backend": "gloo",
    "use-cpu-initialization": True,
    "no-rope-fusion": True,
    "no-masked-softmax-fusion": True,
    "no-bias-swiglu-fusion": True,
    "no-persist-layer-norm": True,
    "no-gradient-accumulation-fusion": True,
    "tokenizer-type": "NullTokenizer",
    "vocab-size": 128,
    "make-vocab-size-divisible-by": 64,
    "mock-data": True,
    "log-interval": 1,
    "eval-iters": 0,
    "eval-interval": 1000,
    "num-workers": 0,
}
"""A Llama that trains in a second on the CPU, in fp32, by Megatron's own flags."""


def use_few_documents() -> None:
    """Megatron makes 100,000 documents up: shuffling them takes a third of a tiny job's time."""
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    MockGPTLowLevelDataset.size = 1000
