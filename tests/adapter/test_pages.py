"""The Python of the Megatron-Core page runs, on one rank and on two alike."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "guides/megatron_core.md"
BLOCKS = {
    "in short": ("with_magi_attention(spec)", ""),
    "forward step": (
        "def forward_step",
        "from megatron_magi.adapter.layer_spec import with_magi_attention\n"
        "from megatron_magi.adapter.plugin import attach\n"
        "model = GPTModel(config, with_magi_attention(spec), vocab_size, max_sequence_length,\n"
        "                 position_embedding_type='rope')\n"
        "attach(model)\n"
        "loss, _ = forward_step(iter([sample]), model)\n"
        "pipeline_seq_length(length, config)",
    ),
}
"""A text that only this block of the page has, and lines that call what it defines."""
OF_A_WHOLE_PROGRAM = ("forward_backward(...", "finish_pipeline_agreement()", "optimizer.step()")


def block_of(name: str) -> str:
    """The page's Python, without lines that only a whole program can run."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    (block,) = [block for block in blocks if BLOCKS[name][0] in block]
    return "\n".join(x for x in block.splitlines() if not x.startswith(OF_A_WHOLE_PROGRAM))


def job(name: str, code: str, then: str, world: int) -> dict[str, Any]:
    kwargs = {"code": code, "then": then}
    return {"name": name, "function": "run_page", "kwargs": kwargs, "world": world}


@pytest.fixture(scope="module")
def results(run_jobs: Any) -> Any:
    jobs = [
        job(f"{name} {world}", block_of(name), then, world)
        for name, (_, then) in BLOCKS.items() for world in (1, 2)
    ]  # fmt: skip
    learned = block_of("in short").replace(', position_embedding_type="rope"', "")
    return run_jobs([*jobs, job("learned positions", learned, "", 1)])


@pytest.mark.parametrize("name", BLOCKS)
def test_its_loss_is_that_of_one_rank(results: Any, name: str) -> None:
    (alone,) = results[f"{name} 1"]["values"]
    assert alone > 100, "the sum over a stream of tokens"
    for spread in results[f"{name} 2"]["values"]:
        assert spread == pytest.approx(alone, rel=1e-5)


def test_learned_positions_have_to_be_given(results: Any) -> None:
    error = results["learned positions"]["error"]
    assert "ValueError: a model with learned absolute positions (GPTModel's default)" in error
