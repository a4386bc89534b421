"""Losses of one microbatch: a sum and its count."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from megatron_magi.adapter.loss import check_loss_config, per_token_loss


def model(**changes: object) -> TransformerConfig:
    settings = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, **changes}
    return TransformerConfig(**settings)


def test_loss_is_a_sum_with_its_count() -> None:
    output = torch.tensor([[1.0, 2.0, float("inf"), 4.0]], requires_grad=True)
    loss, count, report = per_token_loss(torch.tensor([[1.0, 0.0, 0.0, 1.0]]), output)
    assert (float(loss.detach()), int(count)) == (5.0, 2)
    assert count.dtype == torch.int32
    assert report["lm loss"].tolist() == [5.0, 2.0]
    loss.backward()
    assert output.grad.tolist() == [[1.0, 0.0, 0.0, 1.0]]


@pytest.mark.parametrize(
    ("mask", "output"), [((1,), (1, 4)), ((1, 4), ()), ((1, 4), (1, 3))], ids=str
)
def test_a_loss_for_each_entry_of_the_mask(mask: tuple[int, ...], output: tuple[int, ...]) -> None:
    """A loss that is already reduced would count once for every token."""
    with pytest.raises(ValueError, match=r"one loss for each entry of loss_mask, got losses \["):
        per_token_loss(torch.ones(mask), torch.ones(output))
    with pytest.raises(TypeError, match="loss_mask must be a Tensor, got None"):
        per_token_loss(None, torch.ones(output))  # type: ignore[arg-type]


def test_average_per_rank_is_refused_under_context_parallelism() -> None:
    check_loss_config(model(context_parallel_size=2, calculate_per_token_loss=True))
    check_loss_config(model())
    with pytest.raises(ValueError, match=r"requires calculate_per_token_loss=True, got False"):
        check_loss_config(model(context_parallel_size=2))
