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

from megatron_magi import debug
from megatron_magi.requirements import MissingRequirement, refusal, starts_a_command

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
    "SliceType",
    "Softmax",
    "TokenLayout",
    "agree",
    "dispatch",
    "dist_attn",
    "flex_flash_attn_by_head_group",
    "flex_flash_attn_func",
    "masks",
    "measured_costs",
    "plan",
    "position_ids",
    "prepare",
    "shift_tokens",
    "slices_tensor",
    "undispatch",
]

try:
    from megatron_magi import masks
    from megatron_magi.config import CostTable, MagiConfig
    from megatron_magi.core.kernel.attention import AttnForwardMeta, flex_flash_attn_func
    from megatron_magi.core.kernel.head_groups import flex_flash_attn_by_head_group
    from megatron_magi.core.kernel.slice_table import slices_tensor
    from megatron_magi.core.kernel.softmax import Softmax
    from megatron_magi.core.mask import AttnMask, AttnSlice, SliceType
    from megatron_magi.core.plan import AttnPlan, HeadShape, TokenLayout
    from megatron_magi.core.runtime.agreement import AgreementError, agree
    from megatron_magi.core.runtime.calibration import measured_costs
    from megatron_magi.core.runtime.dist_attn import dist_attn
    from megatron_magi.core.runtime.plan_cache import plan_for as plan
    from megatron_magi.core.runtime.prepared import prepare
    from megatron_magi.core.runtime.shift import shift_tokens
    from megatron_magi.core.runtime.token_dispatch import dispatch, position_ids, undispatch
except MissingRequirement as error:
    if not starts_a_command():
        raise
    globals()["__getattr__"] = refusal(error, __all__)
except KeyboardInterrupt:  # torch takes a second or two
    if not starts_a_command():
        raise
    raise SystemExit(130) from None
