#!/usr/bin/env python3
"""`megatron-magi data`, for a checkout that is not installed.

python scripts/prepare_data.py my_texts/ --output runs/data/corpus --include '*.md' '*.txt'
"""

from __future__ import annotations

import sys

from megatron_magi.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", *sys.argv[1:]]))
