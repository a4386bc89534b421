"""The only reader of ``MAGI_DEBUG_*`` and of torch's switch for its compiler: never results.

MAGI_DEBUG_LOG=INFO (or DEBUG) shows the package's log on stderr.
"""

from __future__ import annotations

import logging
import os

from megatron_magi.checks import word


def setup_logging() -> None:
    """Attach a stderr handler when MAGI_DEBUG_LOG names a level; otherwise leave logging alone.

    Raises:
        ValueError: it names no level.
    """
    level = os.environ.get("MAGI_DEBUG_LOG")
    if level:
        level = word(level.upper(), "MAGI_DEBUG_LOG", ("DEBUG", "INFO", "WARNING", "ERROR"))
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("megatron_magi %(levelname)s %(message)s"))
        logger = logging.getLogger("megatron_magi")
        logger.addHandler(handler)
        logger.setLevel(level)


def is_compiler_off() -> bool:
    """True if TORCH_COMPILE_DISABLE=1 lets torch.compile run functions uncompiled."""
    return os.environ.get("TORCH_COMPILE_DISABLE") == "1"
