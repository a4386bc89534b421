"""Variables by which a job steers TransformerEngine's attention, whose place ours has taken."""

from __future__ import annotations

import os

BACKENDS = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
"""They choose one of its attentions; 1 is the usual value."""


def is_deterministic() -> bool:
    """True if the job asks TransformerEngine's attention for equal bits from run to run."""
    return os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0"


def forget_backends() -> list[str]:
    """Unset variables that choose a backend, and return their names.

    Megatron stops if they choose one and its own flag, which was magi's switch, chooses none.
    """
    given = [name for name in BACKENDS if os.environ.get(name, "1") != "1"]
    for name in given:
        del os.environ[name]
    return given
