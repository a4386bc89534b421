"""Conversations for Megatron's SFTDataset, whose own reader and tokenizers need more packages."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
from megatron.training.datasets import sft_dataset


class _Words:
    """A tokenizer of conversations: numbers in, the same numbers out; prompts give no loss."""

    eod, pad = 126, 127

    def tokenize_conversation(
        self, conversation: list[dict[str, Any]], **unused: Any
    ) -> tuple[Any, Any]:
        tokens = np.concatenate([message["content"] for message in conversation])
        targets = tokens.copy()
        targets[: len(conversation[0]["content"])] = sft_dataset.IGNORE_INDEX
        return tokens, targets


def use_invented_conversations() -> None:
    """Give SFTDataset packs of short conversations of uneven lengths."""
    rng = np.random.default_rng(3)
    packs = [_pack(rng) for _ in range(64)]
    build = sft_dataset.SFTDataset.__init__

    @functools.wraps(build)
    def __init__(  # the parameters that the launcher's table asks for
        self: Any, dataset: Any, dataset_path: Any, indices: Any, num_samples: Any,
        index_split: Any, config: Any,
    ) -> None:  # fmt: skip
        build(self, dataset, dataset_path, indices, num_samples, index_split, config)
        self.config = copy.copy(config)
        self.config.tokenizer = _Words()

    sft_dataset.SFTDataset.__init__ = __init__
    sft_dataset.SFTDataset.build_low_level_dataset = staticmethod(lambda path, config: packs)


def _pack(rng: np.random.Generator) -> list[dict[str, Any]]:
    messages = []
    for _ in range(int(rng.integers(2, 6))):
        messages.append({"role": "system", "content": rng.integers(0, 120, rng.integers(1, 5))})
        messages.append({"role": "user", "content": rng.integers(0, 120, rng.integers(3, 30))})
    return messages
