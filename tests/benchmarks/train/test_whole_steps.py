"""The cases of whole steps, and the documents and conversations that they train on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import megatron_magi.adapter  # noqa: F401  prepares the import of Megatron
from benchmarks.distributed.packs import short_documents
from benchmarks.planner.layouts import documents
from benchmarks.planner.plans import DISTRIBUTIONS
from benchmarks.train import corpora
from benchmarks.train.pretrain_sft import PACKS, PROMPT, lengths_of_packs, pack
from benchmarks.train.whole_steps import SFT_MODULE, balance_cases, sample_cases, whole_step_cases
from megatron_magi.launcher.file_samples import FileSamples

from megatron.core.datasets.indexed_dataset import IndexedDataset  # isort: skip

KINDS = ("fp8", "sft-short", "sft-long", "recompute", "profile")
TOKENS = 32_768


def kind_of(case: str) -> str:
    """How it trains, if not in bf16 on causal sequences; or `profile`."""
    return next((word for word in case.split() if word in KINDS), "")


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_every_case_of_magi_has_stock_runs_of_its_kind_model_and_length(gpus: int) -> None:
    cases = whole_step_cases(gpus)
    assert len({case.name for case in cases}) == len(cases)
    places = {(kind_of(x.name), *x.name.split()[-2:]) for x in cases if x.name.startswith("stock")}
    for case in (x for x in cases if x.name.startswith("magi")):
        assert (kind_of(case.name), *case.name.split()[-2:]) in places
    assert {kind for kind, *_ in places} == {"", *KINDS}


def test_every_sample_of_a_data_file_is_one_step() -> None:
    cases = sample_cases()
    assert {x.documents for x in cases} == {*DISTRIBUTIONS} and len(cases) == 3 * len(DISTRIBUTIONS)
    for case in cases:
        assert case.name.split()[-2:] == [f"{case.documents}-docs", str(case.flags["seq-length"])]
        assert case.flags["global-batch-size"] == case.gpus == 1
        assert case.flags["train-iters"] * case.flags["seq-length"] < corpora.TOKENS


def test_fine_tuning_alone_runs_on_drawn_conversations() -> None:
    for case in whole_step_cases(2):
        assert (case.module == SFT_MODULE) == ("sft" in case.flags) == ("sft-" in case.name)


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_every_division_takes_the_same_tokens_a_step(gpus: int) -> None:
    cases = balance_cases(gpus)
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        documents, samples, length = case.name.split()[-3:]
        assert f"{case.documents}-docs" == documents
        assert case.flags["global-batch-size"] == int(samples)
        assert case.flags["seq-length"] == int(length)
        assert case.flags["train-iters"] * int(samples) * int(length) < corpora.TOKENS
        assert case.flags["train-iters"] * int(samples) <= PACKS
        assert (case.module == SFT_MODULE) == ("sft" in case.flags) == (" sft " in case.name)
    dealt = [case for case in cases if "magi-balance-step" in case.flags]
    per_gpu = {case.flags["global-batch-size"] // gpus for case in dealt}
    assert per_gpu == ({4} if gpus == 2 else {1, 4})


def test_a_pack_fills_a_sequence_with_conversations_that_end_anywhere() -> None:
    rng = np.random.default_rng(3)
    messages = pack(short_documents(TOKENS, rng), rng)
    roles = [message["role"] for message in messages]
    assert roles == ["system", "user"] * (len(messages) // 2)
    assert {len(message["content"]) for message in messages[::2]} == {PROMPT}
    lengths = [PROMPT + len(message["content"]) for message in messages[1::2]]
    assert TOKENS - 8 * len(lengths) <= sum(lengths) <= TOKENS
    assert len({length % 8 for length in lengths}) > 1


def test_packs_of_a_distribution_are_the_samples_of_its_data_file() -> None:
    lengths = lengths_of_packs("wlb", TOKENS, np.random.default_rng(0))
    samples = FileSamples(documents("wlb"), TOKENS)
    for number in (0, 1, PACKS - 1):
        assert sum(lengths(number)) == TOKENS
        assert [0, *np.cumsum(lengths(number))] == samples.boundaries(number).tolist()


def test_a_corpus_of_drawn_documents_is_megatrons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpora, "TOKENS", 10_000)
    prefix = corpora.corpus("wlb", tmp_path)
    wanted = documents("wlb").sequence_lengths
    dataset = IndexedDataset(str(prefix))  # its arrays are views of a file that it holds open
    found = dataset.sequence_lengths
    assert found.tolist() == wanted[: len(found)].tolist()
    assert found[:-1].sum() <= 10_000 < found.sum()
    assert np.fromfile(f"{prefix}.bin", dtype=np.uint16).max() < corpora.HIGHEST
