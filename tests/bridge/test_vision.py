"""Qwen3-VL of Megatron-Bridge under `use_magi`: its packed rows are selected by the plan.

The language model is a stand-in (tests/stand_ins/bridge), and Bridge's own where it is installed.
The yardstick runs one document after another, without the hooks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bridge.test_use_magi import has_bridge
from tests.megatron_worker import run_jobs_of

HERE = Path(__file__).parent
STAND_INS = HERE.parent / "stand_ins"
RELATIVE = 2e-5
TIMEOUT_S = 200

pytestmark = pytest.mark.timeout(TIMEOUT_S + 10)


def job(name: str, world: int = 1, **kwargs: Any) -> dict[str, Any]:
    return {"name": name, "function": "run", "kwargs": kwargs, "world": world}


JOBS = [
    job("stock", magi=False),
    job("cp1"),
    job("cp2", 2),
    job("small chunks", 2, chunk_size=6),
    job("words stock", magi=False, images=False),
    job("words", 2, images=False),
    job("stock positions", 2, stock_positions=True),
    job("not padded", 2, multiple=1),
]


OF_BRIDGE = ("stock", "cp1", "small chunks", "words stock", "words")
"""Jobs that need nothing of TransformerEngine."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    first = (STAND_INS / "bridge",)
    folder = tmp_path_factory.mktemp("vision")
    return run_jobs_of(HERE / "vision_jobs.py", JOBS, folder, TIMEOUT_S, first)


def sums(results: Any, name: str) -> dict[str, torch.Tensor]:
    found = results[name]["values"][-1]["sums"]
    return {key: torch.tensor(value) for key, value in found.items()}


@pytest.mark.parametrize(
    ("name", "yardstick"),
    [("cp1", "stock"), ("cp2", "stock"), ("small chunks", "stock"), ("words", "words stock")],
)
def test_loss_and_gradients_are_those_of_single_documents(
    results: Any, name: str, yardstick: str
) -> None:
    assert_equal(sums(results, name), sums(results, yardstick))


@pytest.mark.bridge
@pytest.mark.skipif(not has_bridge(), reason="megatron.bridge is not installed")
def test_bridges_own_language_model(tmp_path: Path) -> None:
    jobs = [each for each in JOBS if each["name"] in OF_BRIDGE]
    results = run_jobs_of(HERE / "vision_jobs.py", jobs, tmp_path, TIMEOUT_S, (STAND_INS,))
    assert_equal(sums(results, "cp1"), sums(results, "stock"))
    assert_equal(sums(results, "small chunks"), sums(results, "stock"))
    assert_equal(sums(results, "words"), sums(results, "words stock"))


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys() and len(ours) > 20
    for key, wanted in theirs.items():
        assert wanted.abs().max() > 0, key
        assert (ours[key] - wanted).abs().max() <= RELATIVE * wanted.abs().max(), key


def test_images_reach_the_loss_and_keys_travel(results: Any) -> None:
    assert "vision_model.weight" in sums(results, "cp2")
    assert all(value["keys travel"] for value in results["small chunks"]["values"])


def test_positions_in_the_order_of_stock_are_noticed(results: Any) -> None:
    moved, right = (sums(results, name) for name in ("stock positions", "stock"))
    assert (moved["loss"] - right["loss"]).abs() > 10 * RELATIVE * right["loss"]
    key = "vision_model.weight"
    assert (moved[key] - right[key]).abs().max() > 0.1 * right[key].abs().max()


def test_a_pack_that_the_plan_would_pad_is_refused(results: Any) -> None:
    error = results["not padded"]["error"]
    assert "requires packs that the plan does not pad, got 119 tokens" in error
    assert "pad every document to a multiple of 16" in error
