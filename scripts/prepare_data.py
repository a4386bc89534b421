#!/usr/bin/env python3
"""Pack text files, folders of them, or JSONL into Megatron's .bin/.idx.

    python scripts/prepare_data.py INPUT... --output runs/data/corpus --include '*.py'

Prints documents, tokens, a length histogram and a sha256. Train on it with data.path=PREFIX.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_magi.training.config import RecipeError
from megatron_magi.training.corpus import ByteTokenizer, limit_bytes, pack, read_documents
from megatron_magi.training.processes import quiet_megatron


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    quiet_megatron()
    documents = read_documents(
        args.inputs, include=tuple(args.include), exclude=tuple(args.exclude), split=args.split
    )
    try:
        stats = pack(limit_bytes(documents, args.max_bytes), args.output, ByteTokenizer())
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(stats.table())
    print(f"wrote {args.output}.bin, .idx, .documents and .json")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("inputs", nargs="+", type=Path, help='files, folders, .jsonl ({"text": .})')
    parser.add_argument("--output", type=Path, required=True, help="prefix of the files to write")
    parser.add_argument("--include", nargs="+", default=["*"], help="file name patterns in folders")
    parser.add_argument("--exclude", nargs="+", default=[], help="files and folders to leave out")
    parser.add_argument("--split", help="regular expression of lines that begin a new document")
    parser.add_argument("--max-bytes", type=int, help="stop once this much text was taken")
    return parser


if __name__ == "__main__":
    sys.exit(main())
