"""The negative controls break what they say, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_magi.core.mask.builders import causal, from_cu_seqlens
from megatron_magi.training.recipe.recipe_error import RecipeError
from tests.convergence.broken_train import TILE, main, without_tile
from tests.megatron_worker import run_jobs_of
from tests.training.conftest import packed_data, tiny_recipe

pytestmark = pytest.mark.slow  # the own trainer, which is changed no more

__all__ = ["packed_data", "tiny_recipe"]
JOBS = Path(__file__).parent / "broken_jobs.py"


@given(
    st.lists(st.integers(1, 200), max_size=5),
    st.integers(256, 500),
    st.integers(0, 4),
    st.booleans(),
)
def test_exactly_one_tile_of_visible_cells_is_lost(
    short: list[int], longest: int, place: int, of_longest: bool
) -> None:
    lengths = [*short[:place], longest, *short[place:]]
    ends = np.cumsum([0, *lengths]).astype(np.int32)
    mask = from_cu_seqlens(ends, causal=True)
    whole, cut = mask.to_dense(), without_tile(mask, of_longest).to_dense()
    lost = np.argwhere(whole & ~cut)
    assert not (cut & ~whole).any() and len(lost) == TILE * TILE
    end = int(ends[lengths.index(longest)]) + longest
    first = end - TILE
    assert lost.min(0).tolist() == [first, first - TILE + 1]
    assert lost.max(0).tolist() == [end - 1, first]


def test_which_document_loses_it() -> None:
    mask = from_cu_seqlens([0, 100, 500, 800, 810], causal=True)
    for of_longest, end in ((False, 800), (True, 500)):
        lost = np.argwhere(mask.to_dense() & ~without_tile(mask, of_longest).to_dense())
        assert len(lost) == TILE * TILE and lost.max(0).tolist()[0] == end - 1


@pytest.mark.parametrize(
    "mask",
    [
        from_cu_seqlens([0, 100, 350, 500], causal=True),
        causal(120),
        from_cu_seqlens([0, 600], causal=True, window_size=(99, 0)),
    ],
    ids=["short_documents", "shorter_than_a_tile", "hidden_cells"],
)
def test_a_mask_without_a_whole_tile_is_refused(mask: Any) -> None:
    with pytest.raises(RecipeError, match="tile control needs a sample with a document of about"):
        without_tile(mask)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["tile", "attention=sdpa"], "breaks attention=magi, got sdpa"),
        (["partial", "parallel.cp=1"], "needs parallel.cp of 2 or more, got 1"),
    ],
    ids=["reference", "one_rank"],
)
def test_a_run_that_would_not_be_broken_is_refused(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error, override = words
    more = ["data.path=nowhere", "parallel.cp=1", override]
    assert main([error, "tiny_llama_cpu", *more]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_controls_change_gradients_and_not_the_first_loss(
    tmp_path: Path, tiny_recipe: Callable[..., dict[str, Any]]
) -> None:
    data = {"seq_length": 512, "mask": "causal"}
    sections = {"data": data, "parallel": {"cp": 2}, "model": {"init_std": 0.2}}
    sections["train"] = {"iterations": 2}

    def job(name: str, error: str | None) -> dict[str, Any]:
        recipe = tiny_recipe(name, tmp_path, **sections)
        kwargs = {"recipe": recipe, "error": error}
        return {"name": name, "function": "train_broken", "kwargs": kwargs, "world": 2}

    jobs = [job("right", None), job("tile", "tile"), job("partial", "partial")]
    results = run_jobs_of(JOBS, jobs, tmp_path, 200)
    first = {}
    for name in ("right", "tile", "partial"):
        assert "error" not in results[name], results[name]["error"]
        _, loss, norm, *_ = results[name]["values"][0][0]
        first[name] = (float.fromhex(loss), float.fromhex(norm))
    assert first["partial"][0] == first["right"][0], "the forward pass is untouched"
    assert abs(first["partial"][1] / first["right"][1] - 1) > 1e-4
    assert abs(first["tile"][0] / first["right"][0] - 1) > 1e-5
