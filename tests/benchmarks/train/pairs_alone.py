"""Stock cases and cases with magi are the same jobs, by Megatron's own parser and checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.lib.changed_arguments import MASK_FLAG
from benchmarks.train.pairs import pairs, unexplained
from benchmarks.train.pretrain import PARTS
from benchmarks.train.pretrain_cases import words
from benchmarks.train.whole_steps import balance_cases, whole_step_cases
from megatron_magi.adapter import MEGATRON_VERSION
from megatron_magi.launcher.preflight import preflight, prepare_megatron, read_job

pytestmark = pytest.mark.skipif(
    MEGATRON_VERSION[:2] < (0, 19), reason="the cases have flags of Megatron 0.19"
)
NUM_PAIRS = {
    "agree": 1,
    "flags": 28,
    "delta_net": 2,
    "graph_speed": 20,
    "graph_speed_2gpus": 24,
    "flags_4gpus": 4,
    "flags_8gpus": 4,
    "sample_speed": 6,
    "te_speed_1gpu": 26,
    "te_speed_2gpus": 86,
    "te_speed_4gpus": 160,
    "te_speed_8gpus": 202,
    "balance_speed_2gpus": 36,
    "balance_speed_4gpus": 36,
    "balance_speed_8gpus": 36,
}


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> None:
    prepare_megatron()
    from tests.launcher.read_docstrings import read_docstrings_once

    read_docstrings_once()


@pytest.mark.parametrize("part", PARTS)
def test_a_stock_case_is_the_same_job_as_its_counterpart(part: str) -> None:
    found = pairs(PARTS[part]())
    assert len(found) == NUM_PAIRS[part]
    wrong = {f"{s.name} | {m.name}": unexplained(s, m) for s, m in found}
    assert {names: apart for names, apart in wrong.items() if apart} == {}


def test_megatron_takes_stocks_conversations_of_real_lengths() -> None:
    cases = [case for case in balance_cases(4) if "sft" in case.flags]
    for case in cases[: len(cases) // 6]:  # the others differ in lengths alone
        assert unexplained(case, case) == {}, case.name


@pytest.mark.parametrize("gpus", [4, 8])
def test_the_launcher_takes_the_cases(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for case in whole_step_cases(gpus) + balance_cases(gpus):
        if case.name.startswith("magi"):
            job = read_job(words({**case.all_flags, "data-path": "corpus"}))
            assert preflight(job, case.gpus, here=False).gpus == gpus, case.name


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({MASK_FLAG[2:]: None}, "create_attention_mask_in_dataloader"),
        ({"overlap-param-gather": None}, "overlap_param_gather"),
        ({"seq-length": 4096}, "seq_length"),
    ],
)
def test_a_stock_case_with_a_handicap_is_caught(flags: dict[str, Any], named: str) -> None:
    stock, magi = pairs(whole_step_cases(4))[0]
    assert named in unexplained(replace(stock, flags={**stock.flags, **flags}), magi)
    other = replace(stock, environment={"NCCL_ALGO": "Ring"})
    assert unexplained(other, magi) == {"environment": ({"NCCL_ALGO": "Ring"}, {})}
