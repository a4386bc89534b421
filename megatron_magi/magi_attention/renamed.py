"""Names and variables of other versions of MagiAttention, and what stands for them here.

MagiAttention is steered by its environment. A switch that silently does nothing would be worse than
one that is missing, so the first call names each ``MAGI_ATTENTION_*`` variable that is set with
what happens instead. Only QO_COMM is read: "1" lets plans send queries.
"""

from __future__ import annotations

import os
import warnings

from megatron_magi.checks import word

REPLACED = {
    # These names of v1.0 are gone by v1.1.1.
    "full_attention_to_varlen_attention": "infer_varlen_mask_from_batch, with the same arguments",
    "from_mask": "megatron_magi.masks.from_dense(mask), planned with megatron_magi.plan",
    "infer_attn_mask_from_window_size": (
        "infer_attn_mask_from_sliding_window, once for each (q_range, k_range, window)"
    ),
    "init_hierarchical_mesh": (
        "torch.distributed.device_mesh.init_device_mesh with mesh_dim_names; with a mesh of "
        "[nodes, ranks of a node] a row is sent to each node once"
    ),
    # These names of v1.1.1 have no counterpart here.
    "dist_attn_runtime_dict_mgr": "nothing: a key holds its plan. clear_cache() empties caches",
    "DistAttnRuntimeDictManager": "nothing: a key holds its plan. clear_cache() empties caches",
    "DistAttnRuntimeMgr": "nothing: dispatch, calc_attn and undispatch take the key",
    "pad_at_dim": "nothing: any length is padded inside. torch.nn.functional.pad does it",
    "unpad_at_dim": "nothing: undispatch drops the padding. Tensor.narrow does it",
}

PREFIX = "MAGI_ATTENTION_"
QO_COMM = PREFIX + "QO_COMM"

_NAMES_BY_REPLACEMENT = {
    "the kernel is MagiConfig(kernel_backend=...)": "KERNEL_BACKEND SDPA_BACKEND FA4_BACKEND",
    "MagiConfig(deterministic=True) does it": "DETERMINISTIC_MODE",
    "MagiConfig(dkv_reduce_in_fp32=...) does it, True by default": "BACKWARD_HIGH_PRECISION_REDUCE",
    "partial outputs are always merged in fp32": "FORWARD_HIGH_PRECISION_REDUCE",
    "a sink's gradient is the rank's share; sum it over the group": "DSINK_ALL_REDUCE_OP",
    "the planner chooses, or DispatchConfig(chunk_size=...)": "MIN_CHUNKS_PER_RANK",
    "the dtype of q, k and v rules": "PRECISION",
    "MAGI_DEBUG_LOG=INFO shows the log": "LOG_LEVEL",
    "ranks always compare what they planned": "SANITY_CHECK",
    "a key holds its plan, whatever a cache holds": "DIST_ATTN_RUNTIME_DICT_SIZE",
    "keys and values are sent by one all-to-all; there is no switch": (
        "NATIVE_GRPCOLL HIERARCHICAL_COMM"
    ),
    "queries are sent with all of their heads": "FLATTEN_HEAD_GROUPS",
    "nothing of this package is built by it": (
        "FORCE_JIT_BUILD PREBUILD_FFA WORKSPACE_BASE BUILD_COMPUTE_CAPABILITY"
    ),
}
INSTEAD = {name: text for text, names in _NAMES_BY_REPLACEMENT.items() for name in names.split()}
"""Behaviour here, by the variable's name behind the prefix; others have no effect at all."""

_told = False


def replacement(name: str, module: str) -> ImportError | AttributeError:
    """The error for a name that is not here; known ones say what to use.

    ``from module import name`` would replace the words of an AttributeError by its own.
    """
    if name in REPLACED:
        return ImportError(
            f"{module} has the names of MagiAttention v1.1.1 that a caller needs, got {name!r}; "
            f"use {REPLACED[name]}"
        )
    return AttributeError(f"module {module!r} has no attribute {name!r}")


def asks_for_queries() -> bool:
    """True if MAGI_ATTENTION_QO_COMM is "1", with which MagiAttention sends queries too.

    Raises:
        ValueError: it is something else than "0" and "1".
    """
    return word(os.environ.get(QO_COMM, "0"), QO_COMM, ("0", "1")) == "1"


def tell_about_environment() -> None:
    """Warn once in a process if a variable of MagiAttention is set; else nothing."""
    global _told
    if _told:
        return
    _told = True
    found = sorted(name for name in os.environ if name.startswith(PREFIX) and name != QO_COMM)
    parts = [f"{name} ({INSTEAD.get(name[len(PREFIX) :], 'no effect')})" for name in found]
    if found:
        warnings.warn(
            f"megatron_magi reads no {PREFIX}* variable but QO_COMM, got {', '.join(parts)}; unset "
            "them, and pass DistAttnConfig(magi_config=MagiConfig(...)) where something is to "
            "change",
            UserWarning,
            stacklevel=3,
        )
