"""Cases of pretrain.py: models, layouts and what runs without TransformerEngine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Flags = dict[str, Any]
MAGI: Flags = {"attention-backend": "magi"}
ALL_TO_ALL: Flags = {**MAGI, "magi-transport": "all_to_all"}
DOCUMENTS: Flags = {"dataloader-inter-document-masking": True}

COMMON: Flags = {
    "bf16": True,
    "micro-batch-size": 1,
    "lr": 1e-3,
    "min-lr": 1e-3,
    "lr-decay-style": "constant",
    "clip-grad": 1.0,
    "weight-decay": 0.1,
    "group-query-attention": True,
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable-bias-linear": True,
    "untie-embeddings-and-output-weights": True,
    "position-embedding-type": "rope",
    "attention-dropout": 0,
    "hidden-dropout": 0,
    "transformer-impl": "local",
    "no-rope-fusion": True,
    "no-masked-softmax-fusion": True,
    "no-persist-layer-norm": True,
    "no-gradient-accumulation-fusion": True,
    "tokenizer-type": "NullTokenizer",
    "split": "100,0,0",
    "log-interval": 1,
    "eval-iters": 0,
    "eval-interval": 100000,
    "num-workers": 2,
    "distributed-timeout-minutes": 5,
    "make-vocab-size-divisible-by": 64,
    "no-create-attention-mask-in-dataloader": True,
}
SMALL: Flags = {
    "num-layers": 4,
    "hidden-size": 512,
    "num-attention-heads": 8,
    "num-query-groups": 4,
    "ffn-hidden-size": 1408,
    "seq-length": 2048,
    "max-position-embeddings": 2048,
    "global-batch-size": 8,
    "train-iters": 20,
    "lr": 2e-4,
    "min-lr": 2e-4,
    "vocab-size": 383,
}
BILLION: Flags = {
    "num-layers": 16,
    "hidden-size": 2048,
    "num-attention-heads": 32,
    "num-query-groups": 8,
    "ffn-hidden-size": 8192,
    "global-batch-size": 4,
    "train-iters": 8,
    "vocab-size": 128255,
    "max-position-embeddings": 131072,
}


WORK = "WORK"
"""In the value of a flag: a folder that the cases of a round share."""


def words(flags: Flags) -> list[str]:
    """Command line of flags; True writes the name alone, False and None nothing."""
    line = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        line += [f"--{name}", *map(str, values)]
    return line


@dataclass(frozen=True)
class Case:
    """One run of the script."""

    name: str
    gpus: int
    flags: Flags = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of its processes."""
    common: Flags = field(default_factory=lambda: COMMON)
    """Flags of all cases of its kind, which `flags` may take away."""
    after: str | None = None
    """Name of a case of the same round that has to end first: it saves what this one loads."""
    module: str | None = None
    """What runs the script, when it is not what the part's other cases have."""
    script: str = "pretrain_gpt.py"
    """Megatron's."""
    documents: str | None = None
    """Distribution of its corpus' lengths; None is the standard library's sources."""

    @property
    def all_flags(self) -> Flags:
        """What the script gets."""
        return {**self.common, **self.flags}


def layout(cp: int = 1, tp: int = 1, pp: int = 1) -> Flags:
    """Flags of a parallel layout; sequence parallelism goes with tensor parallelism."""
    return {
        "context-parallel-size": cp,
        "tensor-model-parallel-size": tp,
        "pipeline-model-parallel-size": pp,
        "sequence-parallel": tp > 1,
    }


AGREE = [
    Case("stock cp1", 1, SMALL),
    Case("magi cp1", 1, {**SMALL, **MAGI}),
    Case("magi cp2", 2, {**SMALL, **MAGI, **layout(cp=2)}),
    Case("magi tp2 sp", 2, {**SMALL, **MAGI, **layout(tp=2)}),
    Case("magi pp2", 2, {**SMALL, **MAGI, **layout(pp=2)}),
    Case("magi cp1 documents", 1, {**SMALL, **MAGI, **DOCUMENTS}),
    Case("magi cp2 documents", 2, {**SMALL, **MAGI, **DOCUMENTS, **layout(cp=2)}),
    Case("magi cp2 all_to_all", 2, {**SMALL, **ALL_TO_ALL, **layout(cp=2)}),
    Case("magi cp2 documents all_to_all", 2, {**SMALL, **ALL_TO_ALL, **DOCUMENTS, **layout(cp=2)}),
    Case("magi cp2 odd", 2, {**SMALL, **MAGI, **layout(cp=2), "seq-length": 2047}),
    Case("stock cp1 odd", 1, {**SMALL, "seq-length": 2047}),
]
