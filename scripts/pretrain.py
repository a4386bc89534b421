#!/usr/bin/env python3
"""`megatron-magi train`, for a checkout that is not installed.

    python scripts/pretrain.py recipes/own_trainer/tiny_llama_cpu.yaml [section.key=value ...]
    python scripts/pretrain.py llama3_1b_4gpu_cp4 --dry-run
    torchrun --nproc-per-node 8 scripts/pretrain.py recipes/own_trainer/llama3_1b_8gpu_cp8.yaml

Alone it starts the recipe's tp * pp * cp * dp processes on this machine; under torchrun it joins.
"""

from __future__ import annotations

import sys

from megatron_magi.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
