"""Our attention in torchtitan's Llama: at two context-parallel ranks what one rank computes.

`PYTHONPATH=CHECKOUT:FOLDER pytest tests/frameworks/test_torchtitan.py`, where CHECKOUT is a source
tree of torchtitan and FOLDER has the packages that its import asks for.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.frameworks import titan_jobs as jobs
from tests.process_pool import pool

pytest.importorskip("torchtitan")
pytestmark = [pytest.mark.timeout(900)]

TIMEOUT_S = 400


@cache
def step(attention: str, cp_size: int) -> list[tuple[float, int, dict[str, Tensor]]]:
    """What every rank has after a step."""
    return pool(cp_size).run(jobs.step, attention, cp_size, timeout_s=TIMEOUT_S)


def assert_gradients_equal(mine: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    """To 1e-5 of the largest element of each weight's gradient."""
    assert mine.keys() == others.keys() and len(mine) > 10
    for name, gradient in others.items():
        bound = float(gradient.abs().max()) * 1e-5
        assert bound > 0, name
        torch.testing.assert_close(mine[name], gradient, rtol=0, atol=bound, msg=name)


@pytest.mark.slow
def test_two_context_ranks_compute_what_one_computes() -> None:
    ((loss, num_tokens, gradients),) = step("magi", 1)
    assert num_tokens == sum(jobs.LENGTHS)
    for shared_loss, num_local, shared in step("magi", 2):
        assert num_local < 0.6 * num_tokens
        assert shared_loss == pytest.approx(loss, rel=1e-6)
        assert_gradients_equal(shared, gradients)


@pytest.mark.slow
def test_one_rank_computes_what_torchtitans_own_attention_computes() -> None:
    ((loss, _, gradients),) = step("magi", 1)
    ((stock_loss, _, stock),) = step("flex", 1)
    assert loss == pytest.approx(stock_loss, rel=1e-6)
    assert_gradients_equal(gradients, stock)


def varlen_configuration(**changes: Any) -> Any:
    from torchtitan.models.llama3 import config_registry

    made = config_registry.llama3_debugmodel_varlen_attn()
    for layer in made.model_spec.model.layers:
        for name, value in changes.items():
            setattr(layer.attention.inner_attention, name, value)
    return made


def test_positions_of_several_rows_are_refused() -> None:
    """Flattened, a document that starts inside a row would begin nowhere."""
    from examples.torchtitan.magi import plan_documents
    from megatron_magi import HeadShape

    heads = HeadShape(2, 2, 16)
    rows = torch.arange(32).repeat(2, 1)
    assert plan_documents(rows.flatten(), heads, None).mask.area() == 2 * 32 * 33 // 2
    with pytest.raises(ValueError, match=r"one stream \[tokens\], got \[2, 32\]; join the rows"):
        plan_documents(rows, heads, None)


def test_only_varlen_attention_over_whole_documents_is_replaced() -> None:
    from torchtitan.models.llama3 import config_registry

    from examples.torchtitan.magi import MagiAttention, with_magi

    made = with_magi(varlen_configuration())
    layers = made.model_spec.model.layers
    assert all(isinstance(x.attention.inner_attention, MagiAttention.Config) for x in layers)
    with pytest.raises(NotImplementedError, match=r"windows \['\(64, 0\)'\]"):
        with_magi(varlen_configuration(window_size=(64, 0)))
    with pytest.raises(NotImplementedError, match="got none; make the model"):
        with_magi(config_registry.llama3_debugmodel())


def test_torchtitan_finds_the_configuration_by_name() -> None:
    from torchtitan.config import ConfigManager

    from examples.torchtitan.magi import MagiTrainer

    flags = ["--module", "examples.torchtitan", "--config", "llama3_debugmodel_magi"]
    found = ConfigManager().parse_args([*flags, "--parallelism.context_parallel_degree", "2"])
    assert isinstance(found, MagiTrainer.Config)
    assert found.parallelism.context_parallel_degree == 2 and found.training.disable_cuda_graphs


def test_what_does_not_fit_is_one_line() -> None:
    from examples.torchtitan.magi import MagiAttention, MagiTrainer

    x = torch.zeros(3, 2, 16)
    with pytest.raises(TypeError, match="needs attention_masks of MagiTrainer, got NoneType"):
        MagiAttention.Config().build()(x, x, x, attention_masks=None)
    trainer = object.__new__(MagiTrainer)
    with pytest.raises(ValueError, match=r"got \['images', 'input', 'positions'\]"):
        trainer.post_dataloading_process({"input": x, "positions": x, "images": x}, x)
