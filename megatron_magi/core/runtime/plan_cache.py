"""A cache of plans by content, so that layers, stages and repeated masks plan once."""

from __future__ import annotations

import threading
from collections import OrderedDict

from megatron_magi.checks import integer, is_integer_like
from megatron_magi.config import MagiConfig
from megatron_magi.core.comm.process_group import CpGroup, group_size
from megatron_magi.core.kernel.autograd import one_graph_break
from megatron_magi.core.mask import AttnMask
from megatron_magi.core.plan import AttnPlan, HeadShape, TokenLayout, make_attn_plan
from megatron_magi.core.plan.attn_plan import check_inputs

PlanKey = tuple[int, int, HeadShape, MagiConfig, "int | None", int]


class PlanCache:
    """The most recently used plans. It is thread safe, so a data loader may plan ahead.

    A plan keeps its device tables alive (10 to 20 MiB at a million tokens on 8 ranks), so the
    capacity is small: it needs to serve the layers and stages of the microbatches in flight.
    """

    def __init__(self, capacity: int = 64) -> None:
        self.capacity = capacity
        self.num_hits = 0
        self._plans: OrderedDict[PlanKey, AttnPlan] = OrderedDict()
        self._lock = threading.Lock()

    def get(
        self,
        mask: AttnMask,
        cp_size: int,
        head_shape: HeadShape,
        config: MagiConfig,
        layout: TokenLayout | None,
        token_multiple: int,
    ) -> AttnPlan:
        digest = None if layout is None else layout.digest
        key = (mask.digest, cp_size, head_shape, config, digest, token_multiple)
        with self._lock:
            if key in self._plans:
                self.num_hits += 1
                self._plans.move_to_end(key)
                return self._plans[key]
        plan = make_attn_plan(
            mask, cp_size, head_shape, config, layout=layout, token_multiple=token_multiple
        )
        self.put(key, plan)
        return plan

    def put(self, key: PlanKey, plan: AttnPlan) -> None:
        with self._lock:
            self._plans[key] = plan
            while len(self._plans) > self.capacity:
                self._plans.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._plans.clear()
            self.num_hits = 0


plan_cache = PlanCache()


@one_graph_break
def plan_for(
    mask: AttnMask,
    cp_size: int | CpGroup,
    head_shape: HeadShape,
    config: MagiConfig | None = None,
    *,
    layout: TokenLayout | None = None,
    token_multiple: int = 1,
) -> AttnPlan:
    """The plan of a mask: which rank computes what, and which rows it needs.

    Every rank computes the same plan, without communication.

    Args:
        mask: self-attention over one packed sequence.
        cp_size: number of context-parallel ranks, or their group or 1-D mesh.
        head_shape: heads and head_dim of one tensor-parallel rank.
        config: None: the defaults.
        layout: the layout of an earlier plan, for a second mask over the same tokens (hybrid
            sliding-window and full layers).
        token_multiple: the tokens per rank are a multiple of it (the tensor-parallel size if
            sequence parallelism splits them).

    Raises:
        ValueError: a mask, config and layout that do not fit together.
    """
    config = MagiConfig() if config is None else config
    check_inputs(mask, head_shape, config, layout)
    if isinstance(cp_size, int) or is_integer_like(cp_size):
        size = integer(cp_size, "cp_size")
    else:
        size = group_size(cp_size)
    tokens = integer(token_multiple, "token_multiple")
    return plan_cache.get(mask, size, head_shape, config, layout, tokens)
