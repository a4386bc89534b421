"""Ranks that share one GPU, for results where there is no second one.

NCCL takes one rank a GPU, so gloo carries everything but the rows of attention, which the ranks
read from each other's memory as on GPUs of their own. Times mean nothing here.
"""

from __future__ import annotations

import os


def allow_sharing() -> None:
    """Let this process read the memory of other processes on its GPU; before it touches a GPU."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    from megatron_magi.core.comm import transport_choice

    transport_choice._why_not = lambda group, like: ""
