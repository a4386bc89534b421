"""Names of other versions of MagiAttention, and what stands for them here."""

from __future__ import annotations

REPLACED = {
    # Of v1.0, gone by v1.1.1.
    "full_attention_to_varlen_attention": "infer_varlen_mask_from_batch, with the same arguments",
    "from_mask": "megatron_magi.masks.from_dense(mask), planned with megatron_magi.plan",
    "infer_attn_mask_from_window_size": (
        "infer_attn_mask_from_sliding_window, once for each (q_range, k_range, window)"
    ),
    "init_hierarchical_mesh": (
        "torch.distributed.device_mesh.init_device_mesh with mesh_dim_names; with a mesh of "
        "[nodes, ranks of a node] a row is sent to each node once"
    ),
    # Of v1.1.1, without a counterpart.
    "dist_attn_runtime_dict_mgr": "nothing: a key holds its plan. clear_cache() empties caches",
    "DistAttnRuntimeDictManager": "nothing: a key holds its plan. clear_cache() empties caches",
    "DistAttnRuntimeMgr": "nothing: dispatch, calc_attn and undispatch take the key",
    "pad_at_dim": "nothing: any length is padded inside. torch.nn.functional.pad does it",
    "unpad_at_dim": "nothing: undispatch drops the padding. Tensor.narrow does it",
}


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
