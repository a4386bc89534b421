"""Blocks of video frames as the mask of a run: which cells, and losses of the dense baseline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_magi.training.data.packed_samples import PackedSample, mask_of_documents
from megatron_magi.training.recipe.run_values import DataConfig

RELATIVE = 2e-5
BLOCKS: dict[str, dict[str, Any]] = {
    "all": {"mask": "block_causal", "block_tokens": 20},
    "window": {"mask": "block_causal", "block_tokens": 20, "block_window": 2},
}
"""Samples have 96 tokens, so the last block is shorter."""
WIDE_WEIGHTS = {"init_std": 0.2}
"""With the usual 0.02 a new model attends to all keys alike and its losses hardly see the mask."""


@given(
    num_tokens=st.integers(1, 40),
    block_tokens=st.integers(1, 45),
    block_window=st.none() | st.integers(1, 6),
)
def test_a_token_sees_its_block_and_those_before(
    num_tokens: int, block_tokens: int, block_window: int | None
) -> None:
    tokens = np.zeros(num_tokens, dtype=np.int64)
    document_ends = np.unique([0, num_tokens // 2, num_tokens]).astype(np.int32)
    counted = np.ones(num_tokens, np.float32)
    sample = PackedSample(0, tokens, tokens, counted, document_ends, ())
    config = DataConfig(
        path="x", mask="block_causal", block_tokens=block_tokens, block_window=block_window
    )
    block = np.arange(num_tokens) // block_tokens
    behind = block[:, None] - block[None, :]
    seen = (behind >= 0) & (behind < (block_window or num_tokens))
    assert np.array_equal(mask_of_documents(sample.cu_seqlens, config).to_dense(), seen)


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_recipe: Callable[..., dict[str, Any]],
    run_training_jobs: Callable[..., dict[str, Any]],
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("runs")

    def job(name: str, data: dict[str, Any], cp: int, attention: str = "magi") -> Any:
        sections = {"data": data, "parallel": {"cp": cp}, "model": WIDE_WEIGHTS}
        recipe = tiny_recipe(name, folder, attention=attention, **sections)
        return {"name": name, "function": "train", "kwargs": {"recipe": recipe}, "world": cp}

    causal = job("causal", {"mask": "causal"}, 1)
    return run_training_jobs(
        [
            causal,
            *(job(f"{name}_cp2", data, 2) for name, data in BLOCKS.items()),
            *(job(f"{name}_dense", data, 1, "dense") for name, data in BLOCKS.items()),
        ]
    )


def losses(results: dict[str, Any], name: str) -> list[float]:
    return [float.fromhex(step[1]) for step in results[name]["values"][0]]


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_two_ranks_train_like_the_dense_baseline(results: dict[str, Any], name: str) -> None:
    ours, dense = losses(results, f"{name}_cp2"), losses(results, f"{name}_dense")
    assert len(ours) == 6
    assert ours == pytest.approx(dense, rel=RELATIVE)
    norms = [[float.fromhex(step[2]) for step in results[f"{name}_{kind}"]["values"][0]]
             for kind in ("cp2", "dense")]  # fmt: skip
    assert norms[0] == pytest.approx(norms[1], rel=RELATIVE)


@pytest.mark.slow
def test_the_mask_reaches_the_loss(results: dict[str, Any]) -> None:
    """Losses of these masks differ by far more than two right runs of one mask do."""
    first = [losses(results, name)[2] for name in ("causal", "all_cp2", "window_cp2")]
    for a, b in zip(first, [*first[1:], first[0]], strict=True):
        assert abs(a - b) / b > 3 * RELATIVE
