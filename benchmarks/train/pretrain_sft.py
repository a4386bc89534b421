"""`megatron_magi.run` on conversations of drawn lengths, packed by Megatron's own SFTDataset.

Megatron's reader of conversations and its tokenizer need further packages; their places are
taken here by messages of random tokens. Packing, padding and boundaries are Megatron's. Lengths
are what CONVERSATIONS says. `short` and `long` are `d1` and `d2` of packs.py
(benchmarks/distributed); a distribution of plans.py (benchmarks/planner) gives the documents of a
data file's samples. Each is 0 to 7 tokens less, so conversations end anywhere. Used by the `sft`
cases of pretrain.py, with and without the flag.
"""

from __future__ import annotations

import copy
import functools
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.distributed.packs import long_documents, short_documents
from megatron_magi import run

Messages = list[dict[str, Any]]

PACKS = 256
"""More than any case trains on."""
PROMPT = 8
"""Tokens of a conversation that give no loss."""
LENGTHS = {"short": short_documents, "long": long_documents}


class Numbers:
    """Stands in for a tokenizer of conversations: their tokens are given."""

    def __init__(self, eod: int) -> None:
        self.eod, self.pad = eod, eod + 1

    def tokenize_conversation(
        self, conversation: list[dict[str, Any]], **unused: Any
    ) -> tuple[Any, Any]:
        """Tokens and targets; those of a prompt are left out of the loss."""
        from megatron.training.datasets.sft_dataset import IGNORE_INDEX

        tokens = np.concatenate([message["content"] for message in conversation])
        targets = tokens.copy()
        targets[: len(conversation[0]["content"])] = IGNORE_INDEX
        return tokens, targets


def main() -> None:
    """Run the script that the command line names."""
    original = runpy.run_path

    def run_path(*args: Any, **kwargs: Any) -> Any:
        rng = np.random.default_rng(0)
        tokens = int(sys.argv[sys.argv.index("--seq-length") + 1])
        lengths = lengths_of_packs(os.environ["CONVERSATIONS"], tokens, rng)
        use_conversations([pack(lengths(i), rng) for i in range(PACKS)], eod=256)
        return original(*args, **kwargs)

    runpy.run_path = run_path
    run.main()


def lengths_of_packs(
    name: str, tokens: int, rng: np.random.Generator
) -> Callable[[int], list[int]]:
    """Lengths of the conversations of a pack, by its number."""
    if name in LENGTHS:
        return lambda number: LENGTHS[name](tokens, rng)
    from benchmarks.planner.layouts import documents
    from megatron_magi.launcher.file_samples import FileSamples

    samples = FileSamples(documents(name), tokens)
    return lambda number: np.diff(samples.boundaries(number)).tolist()


def use_conversations(packs: Sequence[Messages], eod: int) -> None:
    """Give Megatron's SFTDataset these packs.

    Args:
        packs: messages of each, whose contents are tokens.
        eod: what ends a conversation, greater than all tokens; the one after it pads.
    """
    from megatron.training.datasets import sft_dataset

    build = sft_dataset.SFTDataset.__init__

    @functools.wraps(build)
    def __init__(  # the parameters that the launcher's table asks for
        self: Any, dataset: Any, dataset_path: Any, indices: Any, num_samples: Any,
        index_split: Any, config: Any,
    ) -> None:  # fmt: skip
        build(self, dataset, dataset_path, indices, num_samples, index_split, config)
        self.config = copy.copy(self.config)
        self.config.tokenizer = Numbers(eod)

    sft_dataset.SFTDataset.__init__ = __init__
    sft_dataset.SFTDataset.build_low_level_dataset = staticmethod(lambda path, config: packs)


def pack(lengths: list[int], rng: np.random.Generator) -> Messages:
    """Messages of conversations of about these lengths, which fill a sequence."""
    messages = []
    for rounded in lengths:
        length = max(rounded - int(rng.integers(0, 8)), PROMPT + 1)
        tokens = rng.integers(0, 256, length)
        messages.append({"role": "system", "content": tokens[:PROMPT]})
        messages.append({"role": "user", "content": tokens[PROMPT:]})
    return messages


if __name__ == "__main__":
    main()
