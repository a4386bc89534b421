"""Pack text files, folders or JSON lines into Megatron's .bin/.idx.

Prints documents, tokens, and Megatron's flags to train on them. All about inputs and tokenizers:
docs/guides/data.md.

examples:
  megatron-magi data my_texts/ --output runs/data/corpus --include '*.md' '*.txt'
  megatron-magi data shards/*.jsonl --output runs/data/web --tokenizer llama3

packs the sources of Python's standard library:
  megatron-magi data "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" \\
    --output runs/data/python_stdlib --include '*.py' --max-bytes 4000000
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron_magi.cli.errors import encoding_error
from megatron_magi.cli.parser import UsageError, add_output_options
from megatron_magi.text.documents import Document, Selection, read_documents


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs", nargs="+", type=Path, metavar="INPUT", help="files, folders, .jsonl"
    )
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
    add_output_options(parser)


def run(options: argparse.Namespace) -> int:
    """Pack and print."""
    # numpy comes with these, and the options and their help need none
    from megatron_magi.text.pack import pack
    from megatron_magi.text.tokenizers import load_tokenizer

    selection = Selection(options.include, options.exclude, options.json_key, options.split)
    try:
        tokenizer = load_tokenizer(options.tokenizer, options.eod_token)
        documents = limit_bytes(read_documents(options.inputs, selection), options.max_bytes)
        lengths = pack(documents, options.output, tokenizer)
    except UnicodeDecodeError as error:
        raise UsageError(encoding_error(error)) from error
    except ValueError as error:
        raise UsageError(str(error)) from error
    facts = {
        "path": str(options.output),
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eod_token": tokenizer.eod,
        "num_documents": len(lengths),
        "num_tokens": sum(lengths),
        "longest": max(lengths),
    }
    if options.json:
        print(json.dumps(facts, indent=1))
        return 0
    if not options.quiet:
        print(
            f"{len(lengths):,} documents, {sum(lengths):,} tokens, longest {max(lengths):,} "
            f"({tokenizer.name} tokenizer, vocabulary {tokenizer.vocab_size}, EOD {tokenizer.eod})"
        )
    print(f"wrote {options.output}.bin and .idx; train on it with --data-path {options.output} "
          f"{tokenizer.flags}")  # fmt: skip
    return 0


def limit_bytes(documents: Iterable[Document], max_bytes: int | None) -> Iterator[Document]:
    """Documents until their text reaches `max_bytes`."""
    taken = 0
    for document in documents:
        if max_bytes is not None and taken >= max_bytes:
            return
        taken += len(document.text)
        yield document


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, got {text}")
    return int(text)
