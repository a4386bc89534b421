"""Fused routing of MoE, which Megatron imports and calls only with --moe-router-fusion."""

from __future__ import annotations

from typing import Any, NoReturn


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        "the stand-in for TransformerEngine requires moe_router_fusion=False, got True; leave it "
        "out of tests that run on it"
    )


fused_compute_score_for_moe_aux_loss = _refuse
fused_moe_aux_loss = _refuse
fused_topk_with_score_function = _refuse
