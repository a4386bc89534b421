"""Functions of `megatron_magi.core.plan`."""

from __future__ import annotations

import megatron_magi as magi
from megatron_magi.core import plan as planning
from tests.edge import kinds as kind
from tests.edge.call import Call
from tests.edge.engine_arguments import MASK, PLAN, SHAPE
from tests.edge.kinds import COUNT, INT, POSITIVE

PLANNING = [
    Call(
        "make_attn_plan",
        planning.make_attn_plan,
        {"mask": MASK, "cp_size": 1, "head_shape": SHAPE, "config": magi.MagiConfig()},
        {
            "mask": kind.MASK,
            "cp_size": POSITIVE.also((2**20, "8192")),
            "head_shape": kind.HEADS,
            "config": kind.config("MagiConfig").also((None, "must be a MagiConfig")),
            "layout": kind.LAYOUT.without(None),
            "key_layout": kind.LAYOUT.without(None),
            "token_multiple": POSITIVE,
        },
    ),
    Call(
        "make_shift_plan",
        planning.make_shift_plan,
        {"layout": PLAN.layout, "shift": 3, "rank": 0},
        {"layout": kind.LAYOUT, "shift": INT, "rank": COUNT.also((1, "got 1"))},
    ),
    *(
        Call(
            name,
            getattr(planning, name),
            {"total_seqlen": 16, "cp_size": 2, "config": magi.MagiConfig()},
            {
                "total_seqlen": COUNT,
                "cp_size": POSITIVE,
                "config": kind.config("MagiConfig").also((None, "must be a MagiConfig")),
                "token_multiple": POSITIVE,
            },
        )
        for name in ("contiguous_layout", "num_local_tokens")
    ),
    Call(
        "most_buffered_rows",
        planning.most_buffered_rows,
        {"stages": PLAN.rank_plan(0).stages},
        {"stages": kind.everything("stage", 3, "ab", [1], None)},
        words={"stages": "stage"},
    ),
    Call(
        "predict_times",
        planning.predict_times,
        {"plan": PLAN},
        {"plan": kind.PLAN},
    ),
]
