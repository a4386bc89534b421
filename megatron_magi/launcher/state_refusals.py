"""Hybrid layer patterns: layers that do not follow a plan, and settings of those with state."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from megatron_magi.adapter.state_settings import DELTA_NET, MAMBA, wrong_state_settings
from megatron_magi.config import MagiConfig

OTHER_LAYERS = {"D": "sparse attention"}
"""Symbols of a hybrid layer pattern that magi's rows do not suit."""

PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
"""Arguments that may hold the pattern, by version."""

PACKAGES = {MAMBA: ("mamba_ssm", "causal_conv1d", "einops"), DELTA_NET: ("fla",)}
"""Packages that Megatron's layers with state import."""


def hybrid_layers(args: Any, magi: MagiConfig) -> Iterator[str]:
    """One line for layers that do not work, and for each setting that layers with state refuse.

    It is checked before anything is built, since layers may need packages of their own.
    """
    for name in PATTERNS:
        pattern = getattr(args, name, None) or ""
        flag = "--" + name.replace("_", "-")
        found = [f"{symbol} ({kind})" for symbol, kind in OTHER_LAYERS.items() if symbol in pattern]
        if found:
            yield (
                f"--attention-backend magi requires hybrid layers that follow the plan, got "
                f"{', '.join(found)} in {pattern!r} ({flag}): selection along the sequence does "
                f"not; leave them out"
            )
        yield from (f"{line} ({flag})" for line in wrong_state_settings(args, pattern))


def absent_packages(args: Any, magi: MagiConfig) -> Iterator[str]:
    """One line for each kind of layer whose packages this machine lacks."""
    pattern = "".join(getattr(args, name, None) or "" for name in PATTERNS)
    for symbol, packages in PACKAGES.items():
        absent = [name for name in packages if importlib.util.find_spec(name) is None]
        if symbol in pattern and absent:
            yield (
                f"layers {symbol} of --hybrid-layer-pattern require {', '.join(packages)}, got no "
                f"{', '.join(absent)}; install them or leave these layers out"
            )
