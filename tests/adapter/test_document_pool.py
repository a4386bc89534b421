"""A document's vector is the mean or the last of its rows, whichever ranks hold them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from megatron_magi import MagiConfig
from megatron_magi.adapter import document_plans, document_pool, packed
from megatron_magi.adapter.document_pool import Pooling, pool_documents
from megatron_magi.adapter.packed import MagiPackedSeqParams
from megatron_magi.core.runtime.plan_cache import layer_plans_for
from megatron_magi.core.runtime.token_dispatch import position_ids

BOUNDS = [0, 5, 5, 6, 17, 30]
"""One document has no token, and another has one."""
CONFIG = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)


def packed_for(rank: int = 0, cp_size: int = 1) -> MagiPackedSeqParams:
    """The rows of one rank of a group, without its processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            document_plans,
            "layer_plans_for",
            lambda layers, _, *a, **b: layer_plans_for(layers, cp_size, *a, **b),
        )
        patch.setattr(packed, "position_ids", lambda plan, _: position_ids(plan, rank))
        patch.setattr(packed, "prepare", lambda *_: None)
        chunks = MagiConfig(chunk_size=4)
        return packed.make_packed_seq_params(
            BOUNDS, CONFIG, None, magi_config=chunks, mask="full", device="cpu"
        )


def stream() -> torch.Tensor:
    return torch.randn(BOUNDS[-1], 6, generator=torch.Generator().manual_seed(1))


def loss_of(pooled: torch.Tensor) -> torch.Tensor:
    """A loss that every pair of documents has a part in."""
    return (pooled @ pooled.T).tril().square().sum()


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_shares_of_three_ranks_add_up_to_the_documents(
    pooling: Pooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = stream().requires_grad_()
    documents = [whole[start:end] for start, end in pairwise(BOUNDS)]
    chosen = [x.mean(0) if pooling == "mean" else x[-1] for x in documents if len(x)]
    wanted = torch.stack([chosen[0], torch.zeros(6), *chosen[1:]])
    (expected,) = torch.autograd.grad(loss_of(wanted), whole)
    monkeypatch.setattr(document_pool, "sum_over_ranks", lambda values, group: values)
    shares = []
    for rank in range(3):
        monkeypatch.setattr(document_pool, "group_rank", lambda group, rank=rank: rank)
        batch = packed_for(rank, 3)
        rows = batch.token_plan.layout.position_ids(rank)
        padding = torch.full((batch.max_seqlen_q - BOUNDS[-1], 6), torch.inf)
        hidden = torch.cat([whole, padding])[rows][:, None]
        shares.append(pool_documents(hidden, batch, pooling))
    pooled = sum(shares)
    torch.testing.assert_close(pooled, wanted)
    torch.testing.assert_close(torch.autograd.grad(loss_of(pooled), whole)[0], expected)


def test_half_precision_is_summed_in_fp32() -> None:
    hidden = torch.full((32, 1, 6), 1.001, dtype=torch.bfloat16)
    vectors = pool_documents(hidden, packed_for())
    assert vectors.dtype == torch.float32 and vectors[4].tolist() == [1.0] * 6


@pytest.mark.parametrize("shape", [(30, 1, 6), (32, 6), (1, 32, 6)])
def test_other_rows_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"hidden must be \[32 rows of this rank, 1, hidden size"):
        pool_documents(torch.zeros(shape), packed_for())


def test_another_pooling_is_refused() -> None:
    wrong: Any = "first"
    with pytest.raises(ValueError, match="pooling must be 'mean' or 'last', got 'first'"):
        pool_documents(torch.zeros(32, 1, 6), packed_for(), wrong)
