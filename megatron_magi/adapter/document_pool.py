"""One vector for each packed document: embedding, reranking and reward models."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_magi.adapter.packed import MagiPackedSeqParams
from megatron_magi.checks import instance, word
from megatron_magi.core.comm.process_group import group_rank
from megatron_magi.core.cuda.tables import upload
from megatron_magi.core.runtime.rank_sum import sum_over_ranks
from megatron_magi.core.tensor_checks import tensor

Pooling = Literal["mean", "last"]
"""The mean of a document's tokens, or its last token."""


def pool_documents(
    hidden: Tensor, packed: MagiPackedSeqParams, pooling: Pooling = "mean"
) -> Tensor:
    """Pool the rows of each document on the ranks that hold them, and sum over the ranks.

    Args:
        hidden: [num_local_tokens, 1, hidden size], floating: the model's output, as a stage without
            `post_process` returns it. Under sequence parallelism gather the rows before.
        packed: the microbatch's plans.
        pooling: "mean" or "last".

    Returns:
        fp32 [documents, hidden size], equal on every context-parallel rank, and 0 for a document
        without tokens; differentiable. Compute the same loss of it on every rank. The gradients of
        parameters are then each rank's share, to be summed over the context-parallel group.

    Raises:
        TypeError: no tensor, or no MagiPackedSeqParams.
        ValueError: another shape than the plan's rows, or another pooling.

    Cost: an all-reduce of the result; nothing in the backward.
    """
    tensor(hidden, "hidden")
    instance(packed, MagiPackedSeqParams, "packed", "make it with make_packed_seq_params")
    word(pooling, "pooling", get_args(Pooling))
    rows = packed.token_plan.layout.num_local_tokens
    if hidden.ndim != 3 or hidden.shape[:2] != (rows, 1):
        raise ValueError(
            f"hidden must be [{rows} rows of this rank, 1, hidden size], got shape "
            f"{list(hidden.shape)}; pass the output of the last layer, gathered under sequence "
            f"parallelism"
        )
    local, documents, shares = (upload(x, hidden.device) for x in _pooled_rows(packed, pooling))
    assert packed.document_bounds is not None, "an assembled object has boundaries"
    pooled = hidden.new_zeros((len(packed.document_bounds) - 1, hidden.shape[2])).float()
    pooled = pooled.index_add(0, documents, hidden[local, 0].float() * shares[:, None])
    return sum_over_ranks(pooled, packed.cp_group)


def _pooled_rows(packed: MagiPackedSeqParams, pooling: Pooling) -> tuple[Tensor, Tensor, Tensor]:
    """(int64 local rows that count, int64 document of each, fp32 share in its document)."""
    bounds = packed.document_bounds
    assert bounds is not None, "an assembled object has boundaries"
    rows: npt.NDArray[np.int64] = packed.token_plan.layout.position_ids(group_rank(packed.cp_group))
    counted = rows < bounds[-1]
    if pooling == "last":
        counted &= np.isin(rows, bounds[1:] - 1)
    local = np.flatnonzero(counted)
    documents = np.searchsorted(bounds, rows[local], side="right") - 1
    shares = np.ones(len(local), np.float32)
    if pooling == "mean":
        shares /= np.diff(bounds)[documents]
    return torch.from_numpy(local), torch.from_numpy(documents), torch.from_numpy(shares)
