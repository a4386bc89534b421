"""What a run with multi-token prediction needs beside the tiny Llama: its yardstick and its log."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import gpt_model
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import multi_token_prediction as mtp

documents: list[int] = []
"""Boundaries of the documents in the microbatch that the dense baseline runs now."""

STOCK = {
    name: getattr(mtp, name) for name in ("roll_tensor", "process_mtp_loss") if hasattr(mtp, name)
}
Helper = mtp.MTPLossLoggingHelper

try:
    getattr(mtp, "is_inference_column_parallel_linear", bool)(None)
except TypeError:
    # 0.20-dev without TransformerEngine: it tests for classes that are stand-ins then, so that no
    # layer of multi-token prediction can be built.
    mtp.is_inference_column_parallel_linear = lambda module: False


def stock_roll_respects_documents() -> None:
    """Give Megatron's own roll the documents, which it takes from a thd PackedSeqParams only.

    The dense baseline cannot pass such an object to the model: DotProductAttention refuses it.
    """

    def roll_tensor(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        bounds = torch.tensor(documents, dtype=torch.int32)
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
        return STOCK["roll_tensor"](tensor, *args, **{**kwargs, "packed_seq_params": packed})

    _put("roll_tensor", roll_tensor)


def keep_stock(what: str | None) -> None:
    """Undo a part of what `attach` did, for the runs that must go wrong."""
    if what == "roll":
        _put("roll_tensor", _zigzag_roll)
    elif what == "counts":
        _put("process_mtp_loss", STOCK["process_mtp_loss"])
    else:
        assert what is None, what


def logged_losses(num_layers: int | None, num_microbatches: int) -> list[float]:
    """Mean loss of every depth over the microbatches of a step, as Megatron's loop logs them."""
    name = "values" if "values" in Helper.tracker else "loss_values"
    values = torch.zeros(num_layers or 0)
    if name in Helper.tracker:
        reduce = getattr(Helper, "reduce_loss_in_tracker", None)
        (reduce or Helper.reduce_metrics_in_tracker)()
        values = Helper.tracker[name].clone()
        clean = getattr(Helper, "clean_loss_in_tracker", None)
        (clean or Helper.clean_metrics_in_tracker)()
    # Only the last pipeline stage logs.
    torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX)
    return (values / num_microbatches).tolist()


def _zigzag_roll(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    return STOCK["roll_tensor"](tensor, *args, **{**kwargs, "packed_seq_params": None})


def _put(name: str, function: Any) -> None:
    for module in (mtp, gpt_model):
        if hasattr(module, name):
            setattr(module, name, function)
