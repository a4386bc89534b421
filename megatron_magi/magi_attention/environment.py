"""``MAGI_ATTENTION_*`` variables: none is read, and whoever sets one is told so once.

MagiAttention is steered by its environment. A switch that silently does nothing would be
worse than one that is missing, so the first call names each variable that is set with what happens
instead.
"""

from __future__ import annotations

import os
import warnings

PREFIX = "MAGI_ATTENTION_"

_BACKEND = "the kernel is MagiConfig(kernel_backend=...)"
_TRAVEL = "keys and values travel by one all-to-all; there is no switch"
_BUILD = "nothing of this package is built by it"

INSTEAD = {
    "KERNEL_BACKEND": _BACKEND,
    "SDPA_BACKEND": _BACKEND,
    "FA4_BACKEND": _BACKEND,
    "DETERMINISTIC_MODE": "MagiConfig(deterministic=True) does it",
    "BACKWARD_HIGH_PRECISION_REDUCE": "MagiConfig(dkv_reduce_in_fp32=...) does it, True by default",
    "FORWARD_HIGH_PRECISION_REDUCE": "partial outputs are always merged in fp32",
    "DSINK_ALL_REDUCE_OP": "a sink's gradient is the rank's share; sum it over the group",
    "MIN_CHUNKS_PER_RANK": "the planner chooses, or DispatchConfig(chunk_size=...)",
    "PRECISION": "the dtype of q, k and v rules",
    "LOG_LEVEL": "MAGI_DEBUG_LOG=INFO shows the log",
    "SANITY_CHECK": "ranks always compare what they planned",
    "DIST_ATTN_RUNTIME_DICT_SIZE": "a key holds its plan, whatever a cache holds",
    "NATIVE_GRPCOLL": _TRAVEL,
    "HIERARCHICAL_COMM": _TRAVEL,
    "QO_COMM": "queries and outputs stay where they are",
    "FLATTEN_HEAD_GROUPS": "queries and outputs stay where they are",
    "FORCE_JIT_BUILD": _BUILD,
    "PREBUILD_FFA": _BUILD,
    "WORKSPACE_BASE": _BUILD,
    "BUILD_COMPUTE_CAPABILITY": _BUILD,
}
"""What happens here, by the variable's name behind the prefix; others have no effect at all."""

_told = False


def tell_about_environment() -> None:
    """Warn once in a process if a variable of MagiAttention is set; else nothing."""
    global _told
    if _told:
        return
    _told = True
    found = sorted(name for name in os.environ if name.startswith(PREFIX))
    parts = [f"{name} ({INSTEAD.get(name[len(PREFIX) :], 'no effect')})" for name in found]
    if found:
        warnings.warn(
            f"megatron_magi reads no {PREFIX}* variable, got {', '.join(parts)}; unset them, and "
            f"pass DistAttnConfig(magi_config=MagiConfig(...)) where something is to change",
            UserWarning,
            stacklevel=3,
        )
