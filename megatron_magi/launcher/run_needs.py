"""Flags without which Megatron ends after its own checks: length of the run, data, vocabulary.

The launcher does not ask for them, because a script may bring its own. `megatron-magi check` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

LENGTHS = ("train_iters", "train_samples")
DATA = (
    "mock_data",
    "data_path",
    "data_args_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "per_split_data_args_path",
)
"""Arguments that name the data of Megatron's own data sets."""

DEFAULT_TOKENIZER = "GPT2BPETokenizer"
"""Megatron's pretrain scripts set it where --tokenizer-type is missing."""

VOCABULARIES = {
    "NullTokenizer": ("vocab_size",),
    "NullMultimodalTokenizer": ("vocab_size",),
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "BertWordPieceLowerCase": ("vocab_file",),
    "BertWordPieceCase": ("vocab_file",),
}
"""Flags that name a tokenizer's vocabulary, by --tokenizer-type; the others read
--tokenizer-model."""


def run_needs(args: Any) -> list[str]:
    """One line for each thing that Megatron's training needs and the flags do not give."""
    return [line for need in NEEDS for line in need(args)]


def _length(args: Any) -> Iterator[str]:
    if not _any(args, LENGTHS) and not getattr(args, "skip_train", False):
        yield "a run requires --train-iters or --train-samples, got none of them; pass one"


def _rate(args: Any) -> Iterator[str]:
    if getattr(args, "lr", None) is None and not getattr(args, "skip_train", False):
        yield "a run requires --lr, got none; pass it"


def _data(args: Any) -> Iterator[str]:
    brings_its_own = getattr(args, "dataloader_type", None) == "external"
    if not _any(args, DATA) and not brings_its_own:
        yield (
            "a run requires data, got neither --data-path nor another flag of data; pass "
            "--data-path, --mock-data, or --dataloader-type external for a script that brings "
            "its own"
        )


def _vocabulary(args: Any) -> Iterator[str]:
    kind = getattr(args, "tokenizer_type", None) or DEFAULT_TOKENIZER
    needed = VOCABULARIES.get(kind, ("tokenizer_model",))
    missing = [f"--{name.replace('_', '-')}" for name in needed if not _any(args, (name,))]
    sources = ("load", "use_checkpoint_args", "use_tokenizer_model_from_checkpoint_args")
    if missing and not all(_any(args, (name,)) for name in sources):
        yield (
            f"--tokenizer-type {kind} requires a vocabulary, got no {' and no '.join(missing)}; "
            f"pass {' and '.join(missing)}"
        )


def _choice(args: Any) -> Iterator[str]:
    experts, chosen = getattr(args, "num_experts", None), getattr(args, "moe_router_topk", 1)
    if experts and chosen > experts:
        yield (
            f"--moe-router-topk must be at most --num-experts, got {chosen} and {experts}; change "
            f"one of them"
        )


def _any(args: Any, names: Iterable[str]) -> bool:
    return any(getattr(args, name, None) for name in names)


NEEDS = (_length, _rate, _data, _vocabulary, _choice)
