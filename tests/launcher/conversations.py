"""Short conversations of uneven lengths for Megatron's SFTDataset."""

from __future__ import annotations

import numpy as np

from benchmarks.train.pretrain_sft import Messages, use_conversations


def use_invented_conversations() -> None:
    """Give SFTDataset packs of a few of them."""
    rng = np.random.default_rng(3)
    use_conversations([_pack(rng) for _ in range(64)], eod=126)


def _pack(rng: np.random.Generator) -> Messages:
    messages = []
    for _ in range(int(rng.integers(2, 6))):
        messages.append({"role": "system", "content": rng.integers(0, 120, rng.integers(1, 5))})
        messages.append({"role": "user", "content": rng.integers(0, 120, rng.integers(3, 30))})
    return messages
