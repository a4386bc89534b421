"""Comparing plans between tensor-parallel ranks and pipeline stages, which share a batch.

Inside a context-parallel group a wrong plan is noticed at the first exchange. Pipeline stages
exchange only activations, whose shapes depend on lengths only. If one of them had other document
boundaries, training would continue with silently wrong results.
"""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_magi.core.plan import AttnPlan
from megatron_magi.core.runtime.agreement.comparison import (
    agree_later,
    finish_agreement,
    open_agreement,
)


def open_pipeline_agreement(timeout_s: float) -> None:
    """Open the comparison; all ranks of a model call it once, when it is built (``attach`` does).

    Cost: a gloo group of the tensor- and pipeline-parallel ranks; nothing if there is one rank.
    """
    group = _model_parallel_group()
    if group is not None:
        open_agreement(group, "tensor- and pipeline-parallel ranks", timeout_s)


def agree_in_pipeline(plan: AttnPlan) -> None:
    """Compare this plan with the other ranks of the model, without waiting.

    Cost: an asynchronous exchange of 1088 bytes per rank.

    Raises:
        AgreementError: an earlier plan differed.
    """
    group = _model_parallel_group()
    if group is not None:
        agree_later(plan, group)


def finish_pipeline_agreement() -> None:
    """Wait until all comparisons of this step are done; call it before the optimizer's step.

    This includes the comparisons of context-parallel ranks, because on a GPU the last exchange of a
    step starts before its comparison is done.

    Raises:
        AgreementError: ranks of one model have different plans; every one of them raises it.
    """
    group = _model_parallel_group()
    if group is not None:
        finish_agreement(group)
    if dist.is_initialized() and parallel_state.model_parallel_is_initialized():
        finish_agreement(parallel_state.get_context_parallel_group())


def _model_parallel_group() -> dist.ProcessGroup | None:
    if not dist.is_initialized() or not parallel_state.model_parallel_is_initialized():
        return None
    group = parallel_state.get_model_parallel_group()
    return group if dist.get_world_size(group) > 1 else None
