"""Auxiliary losses of a router are scaled by the tokens of all ranks that share them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_magi.launcher.moe import wrap_attach_aux_loss, wrap_z_loss


def router(ranks: int, coefficient: float | None = None) -> SimpleNamespace:
    group = SimpleNamespace(size=lambda: ranks)
    config = SimpleNamespace(moe_z_loss_coeff=coefficient)
    return SimpleNamespace(tp_cp_group=group, config=config)


def seen(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self, args, kwargs


ROWS = torch.zeros(6, 4)


def test_a_loss_of_all_ranks_counts_the_tokens_of_all_ranks() -> None:
    """Those of the activation, unless the caller says how many of its rows count."""
    attach, self = wrap_attach_aux_loss(seen, None), router(4)
    for given, tokens in (({}, 24), ({"valid_token_count": 5}, 20), ({"valid_token_count": 0}, 0)):
        got, args, kwargs = attach(self, ROWS, 0.01, "a loss", name="aux", **given)
        assert got is self and args[0] is ROWS and args[1:] == (0.01, "a loss")
        assert kwargs == {"name": "aux", "valid_token_count": tokens}


def test_a_count_that_is_none_is_that_of_the_activation() -> None:
    _, _, kwargs = wrap_attach_aux_loss(seen, None)(router(2), ROWS, valid_token_count=None)
    assert kwargs == {"valid_token_count": 12}


def test_a_z_loss_has_the_coefficient_that_the_group_will_divide() -> None:
    self = router(4, 1e-3)
    during = []

    def apply(self: Any, logits: torch.Tensor, padding: Any = None) -> tuple[Any, Any]:
        during.append(self.config.moe_z_loss_coeff)
        return logits, padding

    assert wrap_z_loss(apply, None)(self, ROWS, padding=3) == (ROWS, 3)
    assert during == [4e-3] and self.config.moe_z_loss_coeff == 1e-3


def test_the_coefficient_comes_back_after_an_error() -> None:
    """The config is shared by all layers."""

    def fail(self: Any) -> None:
        raise RuntimeError("out of memory")

    self = router(4, 1e-3)
    with pytest.raises(RuntimeError, match="out of memory"):
        wrap_z_loss(fail, None)(self)
    assert self.config.moe_z_loss_coeff == 1e-3


def test_without_a_z_loss_nothing_is_multiplied() -> None:
    self = router(4, None)
    got, args, kwargs = wrap_z_loss(seen, None)(self, ROWS, padding=3)
    assert got is self and args[0] is ROWS and kwargs == {"padding": 3}
    assert self.config.moe_z_loss_coeff is None
