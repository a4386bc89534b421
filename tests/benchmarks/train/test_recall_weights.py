"""A model that copies, with stock attention and with ours on one process and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.megatron_worker import run_jobs_of

pytestmark = pytest.mark.slow

JOBS = Path(__file__).parent / "recall_jobs.py"
TOKENS = 2 * 31 * 15
"""Of two documents of 1,024 tokens, with 31 repeated blocks each."""


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of every run, by its mask or its attention."""
    ours = ("right_mask", "moved_by_one", "first_keys", "split_documents", "joined_documents")
    kwargs: dict[str, dict[str, Any]] = {
        **{name: {"mask": name, "bf16": True} for name in ours},
        "alone": {"mask": "right_mask"},
        "stock": {"mask": "right_mask", "attention": "stock"},
    }
    jobs = [
        {
            "name": name,
            "function": "recalled",
            "kwargs": words,
            "world": 2 if "bf16" in words else 1,
        }
        for name, words in kwargs.items()
    ]
    done = run_jobs_of(JOBS, jobs, tmp_path_factory.mktemp("jobs"), 280)
    return {name: result["values"][0] for name, result in done.items() if name in kwargs}


@pytest.mark.parametrize("name", ["stock", "alone", "right_mask"])
def test_every_token_is_recalled(counts: dict[str, Any], name: str) -> None:
    assert (counts[name]["tokens"], counts[name]["missed"]) == (TOKENS, 0)
    assert counts[name]["loss"] < 1e-6


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("moved_by_one", 1, 1),
        # Of 128 queries 120 repeat a token, of 496 keys; the mask hides 512 less the first.
        ("first_keys", 2 * 110, 2 * 120),
        ("split_documents", TOKENS, TOKENS),
        ("joined_documents", 1, TOKENS // 2),
    ],
)
def test_errors_of_a_mask_cost_tokens(
    counts: dict[str, Any], name: str, least: int, most: int
) -> None:
    assert counts[name]["tokens"] == TOKENS
    assert least <= counts[name]["missed"] <= most
