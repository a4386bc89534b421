#!/usr/bin/env python3
"""Pack text files, folders, JSON lines or tar archives into Megatron's .bin/.idx.

    python scripts/prepare_data.py INPUT... --output runs/data/corpus --include '*.py'
    python scripts/prepare_data.py shards/*.jsonl.xz --output runs/data/web --tokenizer llama3

Prints documents, tokens, a length histogram, a sha256 and the recipe keys to train on it. All about
inputs and tokenizers: docs/data.md.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from megatron_magi.cli.one_line import guarded
from megatron_magi.cli.parser import CommandParser
from megatron_magi.training.data.corpus import Document, pack
from megatron_magi.training.data.text_source import Selection, TextSource
from megatron_magi.training.data.tokenizers import load_tokenizer
from megatron_magi.training.process.processes import num_cpus, quiet_megatron
from megatron_magi.training.recipe.recipe_error import RecipeError


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    quiet_megatron()
    signal.signal(signal.SIGTERM, _end)
    selection = Selection(
        include=tuple(args.include),
        exclude=tuple(args.exclude),
        json_key=args.json_key,
        split=args.split,
    )
    try:
        tokenizer = load_tokenizer(args.tokenizer, args.eod_token)
        source = TextSource(args.inputs, selection)
        documents = limit_bytes(with_bar(source), args.max_bytes)
        stats = pack(documents, args.output, tokenizer, args.workers)
    except (RecipeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted, nothing was written", file=sys.stderr)
        return 130
    if source.num_binary:
        print(f"left out {source.num_binary:,} binary files", file=sys.stderr)
    print(stats.table())
    print(
        f"wrote {args.output}.bin, .idx, .documents and .json; train on it with "
        f"data.path={args.output} data.eod_token={stats.eod_token} "
        f"model.vocab_size={stats.vocab_size}"
    )
    return 0


def limit_bytes(documents: Iterable[Document], max_bytes: int | None) -> Iterator[Document]:
    """Documents until their text reaches `max_bytes`."""
    taken = 0
    for document in documents:
        if max_bytes is not None and taken >= max_bytes:
            return
        taken += len(document.text)
        yield document


def with_bar(source: TextSource) -> Iterator[Document]:
    """The documents, with a bar on standard error where that is a terminal and tqdm is here."""
    if not sys.stderr.isatty() or find_spec("tqdm") is None:
        yield from source
        return
    from tqdm import tqdm

    with tqdm(total=source.num_bytes, unit="B", unit_scale=True) as bar:
        for document in source:
            yield document
            bar.update(source.bytes_read - bar.n)


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # an exception, so that what was begun is removed


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, got {text}")
    return int(text)


def _parser() -> CommandParser:
    parser = CommandParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    inputs = "files, folders, .jsonl, .tar; each also .gz or .xz"
    parser.add_argument("inputs", nargs="+", type=Path, help=inputs)
    parser.add_argument("--output", type=Path, required=True, help="prefix of the files to write")
    parser.add_argument(
        "--tokenizer", default="byte", help="byte, llama3, or a folder with a tokenizer.json"
    )
    parser.add_argument("--eod-token", help="ends a document; for a folder whose files name no EOS")
    parser.add_argument("--include", nargs="+", default=["*"], help="file name patterns in folders")
    parser.add_argument("--exclude", nargs="+", default=[], help="files and folders to leave out")
    parser.add_argument("--json-key", default="text", help="where .jsonl lines have their text")
    parser.add_argument("--split", help="regular expression of lines that begin a new document")
    parser.add_argument("--max-bytes", type=_positive, help="stop once this much text was taken")
    parser.add_argument(
        "--workers", type=_positive, default=num_cpus(), help="processes; changes no byte"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(guarded(main))
