"""Pack text files, folders, JSON lines or tar archives into Megatron's .bin/.idx.

Prints documents, tokens, a length histogram, a sha256 and the recipe keys to train on it. All about
inputs and tokenizers: docs/data.md.

examples:
  megatron-magi data my_texts/ --output runs/data/corpus --include '*.md' '*.txt'
  megatron-magi data shards/*.jsonl.xz --output runs/data/web --tokenizer llama3

what the recipe tiny_llama_cpu trains on:
  megatron-magi data "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" \\
    --output runs/data/python_stdlib --include '*.py' --max-bytes 4000000
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from megatron_magi.cli.one_line import INTERRUPTED
from megatron_magi.cli.parser import add_output_options
from megatron_magi.training.data.text_source import Document, Selection, TextSource
from megatron_magi.training.process.processes import num_cpus, quiet_megatron


def add_arguments(parser: argparse.ArgumentParser) -> None:
    inputs = "files, folders, .jsonl, .tar; each also .gz or .xz"
    parser.add_argument("inputs", nargs="+", type=Path, metavar="INPUT", help=inputs)
    parser.add_argument(
        "--output", type=Path, required=True, metavar="PREFIX", help="prefix of the files to write"
    )
    parser.add_argument(
        "--tokenizer", default="byte", help="byte, llama3, or a folder with a tokenizer.json"
    )
    parser.add_argument("--eod-token", help="ends a document; for a folder whose files name no EOS")
    parser.add_argument("--include", nargs="+", default=["*"], help="file name patterns in folders")
    parser.add_argument("--exclude", nargs="+", default=[], help="files and folders to leave out")
    parser.add_argument("--json-key", default="text", help="where .jsonl lines have their text")
    parser.add_argument("--split", help="regular expression of lines that begin a new document")
    parser.add_argument("--max-bytes", type=_whole, help="stop once this much text was taken")
    parser.add_argument(
        "--workers", type=_whole, default=num_cpus(), help="processes; changes no byte"
    )
    add_output_options(parser)


def run(options: argparse.Namespace) -> int:
    """Pack and print; 0, or 130 after Ctrl-C with nothing written."""
    # numpy comes with these, and the options and their help need none
    from megatron_magi.training.data.corpus import pack
    from megatron_magi.training.data.tokenizers import load_tokenizer

    quiet_megatron()
    selection = Selection(
        include=tuple(options.include),
        exclude=tuple(options.exclude),
        json_key=options.json_key,
        split=options.split,
    )
    try:
        with _sigterm_raises():
            tokenizer = load_tokenizer(options.tokenizer, options.eod_token)
            source = TextSource(options.inputs, selection)
            documents = limit_bytes(with_bar(source), options.max_bytes)
            stats = pack(documents, options.output, tokenizer, options.workers)
    except KeyboardInterrupt:
        print("interrupted, nothing was written", file=sys.stderr)
        return INTERRUPTED
    if options.json:
        facts = {"path": str(options.output), "binary_files": source.num_binary, **asdict(stats)}
        print(json.dumps(facts, indent=1))
        return 0
    if source.num_binary:
        print(f"left out {source.num_binary:,} binary files", file=sys.stderr)
    if not options.quiet:
        print(stats.table())
    print(
        f"wrote {options.output}.bin, .idx, .documents and .json; train on it with "
        f"data.path={options.output} data.eod_token={stats.eod_token} "
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


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM becomes an exception, so that what was begun is removed."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, got {text}")
    return int(text)
