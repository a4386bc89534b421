"""Load-balanced context parallelism for stock Megatron-Core: any mask, no redundant byte.

    import megatron_magi as magi

    mask = magi.masks.from_cu_seqlens(cu_seqlens)
    plan = magi.plan(mask, cp_group, magi.HeadShape(num_heads_q, num_heads_kv, head_dim))
    x_local = magi.dispatch(x, plan, cp_group)
    out, lse = magi.dist_attn(q, k, v, plan, cp_group)
    y = magi.undispatch(y_local, plan, cp_group)

Importing needs no GPU and no Megatron. Without torch or the compiled planner it is one ImportError
that says what to do; the command line starts then too, so that `megatron-magi doctor` can say more.
"""

# ruff: noqa: F403, F405  the names of __all__ are imported in one place, also when that is late

from megatron_magi import debug
from megatron_magi.requirements import at_first_use, starts_a_command

__version__ = "0.1.0"

debug.setup_logging()

__all__ = [
    "AgreementError",
    "AttnForwardMeta",
    "AttnMask",
    "AttnPlan",
    "AttnSlice",
    "CostTable",
    "HeadShape",
    "MagiConfig",
    "PrefixTree",
    "SliceType",
    "Softmax",
    "TokenLayout",
    "TreeEdges",
    "agree",
    "dispatch",
    "dist_attn",
    "flex_flash_attn_by_head_group",
    "flex_flash_attn_func",
    "masks",
    "plan",
    "position_ids",
    "prepare",
    "shift_tokens",
    "slices_tensor",
    "sum_by_branch",
    "tree_edges",
    "undispatch",
]

if starts_a_command():  # its help, version and usage errors need not wait for torch
    globals()["__getattr__"] = at_first_use(__all__)
else:
    from megatron_magi.public import *
