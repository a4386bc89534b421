"""Packs Python sources for flag_convergence.py: a vocabulary trained on them, and two sets.

    python -m benchmarks.train.code_corpus --out FOLDER SOURCES...

Files of SOURCES are taken once each by content, shuffled by a seed, and cut to exactly the tokens
that the runs of docs/results/convergence_protocol.md read; the sets share no file. FOLDER gets
train.bin, train.idx, valid.bin, valid.idx (uint16), tokenizer.json and corpus.json, which says what
is in it.
Needs tokenizers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.train.flag_cases import EOD, MODEL
from megatron_magi.cli.one_line import guarded
from megatron_magi.cli.parser import CommandParser, UsageError

LENGTH = int(MODEL["seq-length"])
SAMPLES = {"train": 1600, "valid": 128}
"""Of this length. The runs of one long document a sample read half of those to train on, and the
runs of many documents a sample read all of them three times."""
TOKENS = {name: samples * LENGTH + 1 for name, samples in SAMPLES.items()}
"""Of each set; the last one is the target of the one before."""
MOST_BYTES = 1_000_000
"""Of a file: longer ones are tables that a program wrote."""
SEED = 2026
BATCH = 500


def main() -> int:
    parser = CommandParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="+", type=Path, help="folders with Python files")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    files = shuffled_files(options.sources)
    tokenizer = trained(files)
    tokenizer.save(str(options.out / "tokenizer.json"))
    documents = chain.from_iterable(
        (encoding.ids for encoding in tokenizer.encode_batch([*map(text_of, batch)]))
        for batch in batches(files)
    )
    facts: dict[str, Any] = {"files": len(files), "seed": SEED}
    for name in ("valid", "train"):
        facts[name] = write(options.out / name, cut(documents, TOKENS[name]))
    (options.out / "corpus.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts, indent=1))
    return 0


def shuffled_files(folders: Sequence[Path]) -> list[Path]:
    """Python files with different contents, in an order that the contents and a seed decide."""
    found: dict[str, Path] = {}
    for path in (path for folder in folders for path in sorted(folder.rglob("*.py"))):
        content = path.read_bytes()
        if 0 < len(content) <= MOST_BYTES:
            found.setdefault(hashlib.sha256(content).hexdigest(), path)
    ordered = [found[digest] for digest in sorted(found)]
    random.Random(SEED).shuffle(ordered)
    return ordered


def text_of(path: Path) -> str:
    """A file's text; bytes that are no UTF-8 are replaced."""
    return path.read_text(encoding="utf-8", errors="replace")


def batches(files: list[Path]) -> Iterator[list[Path]]:
    """Files a few hundred at a time."""
    for begin in range(0, len(files), BATCH):
        yield files[begin : begin + BATCH]


def trained(files: list[Path]) -> Any:
    """A byte-level BPE tokenizer of as many tokens as the model's vocabulary has, but one."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(map(text_of, files), vocab_size=EOD, show_progress=False)
    return tokenizer


def cut(documents: Iterator[list[int]], tokens: int) -> Iterator[list[int]]:
    """Documents with their end, up to exactly this many tokens.

    Raises:
        UsageError: there are fewer.
    """
    left = tokens
    for document in documents:
        ended = [*document, EOD][:left]
        yield ended
        left -= len(ended)
        if left == 0:
            return
    raise UsageError(
        f"the sources must have {left:,} more tokens than they have; name more folders"
    )


def write(prefix: Path, documents: Iterator[list[int]]) -> dict[str, Any]:
    """Write Megatron's .bin and .idx; what is in them."""
    import torch

    from megatron_magi import adapter  # noqa: F401  prepares the import of Megatron

    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder  # isort: skip

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    lengths = []
    for document in documents:
        builder.add_document(torch.tensor(document, dtype=torch.int64), [len(document)])
        lengths.append(len(document))
    builder.finalize(f"{prefix}.idx")
    digest = hashlib.sha256(Path(f"{prefix}.bin").read_bytes()).hexdigest()
    return {"documents": len(lengths), "tokens": sum(lengths), "sha256": digest}


if __name__ == "__main__":
    raise SystemExit(guarded(main))
