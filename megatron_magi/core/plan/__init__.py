"""L1: which rank owns, computes and sends what; pure functions of mask, group, heads and config."""

from megatron_magi.core.plan.attn_plan import AttnPlan
from megatron_magi.core.plan.group_cast_plan import GroupCastPlan
from megatron_magi.core.plan.head_shape import HeadShape
from megatron_magi.core.plan.limits import PlanSizeError
from megatron_magi.core.plan.make_plan import make_attn_plan
from megatron_magi.core.plan.node_cast_plan import NodeCastPlan
from megatron_magi.core.plan.rank_plan import RankPlan, StagePlan, most_buffered_rows
from megatron_magi.core.plan.shift_plan import make_shift_plan
from megatron_magi.core.plan.stage_times import predict_times
from megatron_magi.core.plan.token_layout import TokenLayout, contiguous_layout, num_local_tokens

__all__ = [
    "AttnPlan",
    "GroupCastPlan",
    "HeadShape",
    "NodeCastPlan",
    "PlanSizeError",
    "RankPlan",
    "StagePlan",
    "TokenLayout",
    "contiguous_layout",
    "make_attn_plan",
    "make_shift_plan",
    "most_buffered_rows",
    "num_local_tokens",
    "predict_times",
]
