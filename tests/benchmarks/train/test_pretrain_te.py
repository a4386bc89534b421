"""The cases beside TransformerEngine, and the conversations that packed fine-tuning trains on."""

from __future__ import annotations

import numpy as np

from benchmarks.train.pretrain_sft import PROMPT, TOKENS, pack
from benchmarks.train.pretrain_te import SFT_MODULE, speed_cases

KINDS = ("fp8", "sft", "recompute", "profile")


def kind_of(case: str) -> str:
    """How it trains, if not in bf16 on causal sequences; or `profile`."""
    return next((word for word in case.split() if word in KINDS), "")


def test_every_case_of_ours_has_stock_runs_of_its_kind_model_and_length() -> None:
    cases = speed_cases()
    assert len({case.name for case in cases}) == len(cases)
    places = {(kind_of(x.name), *x.name.split()[-2:]) for x in cases if x.name.startswith("stock")}
    for case in (x for x in cases if x.name.startswith("magi")):
        assert (kind_of(case.name), *case.name.split()[-2:]) in places
    assert {kind for kind, *_ in places} == {"", *KINDS}


def test_fine_tuning_alone_runs_on_drawn_conversations() -> None:
    for case in speed_cases():
        assert (case.module == SFT_MODULE) == ("sft" in case.flags) == ("sft" in case.name.split())


def test_a_pack_fills_a_sequence_with_conversations_that_end_anywhere() -> None:
    messages = pack(np.random.default_rng(3))
    roles = [message["role"] for message in messages]
    assert roles == ["system", "user"] * (len(messages) // 2)
    assert {len(message["content"]) for message in messages[::2]} == {PROMPT}
    lengths = [PROMPT + len(message["content"]) for message in messages[1::2]]
    assert TOKENS - 8 * len(lengths) <= sum(lengths) <= TOKENS
    assert len({length % 8 for length in lengths}) > 1
