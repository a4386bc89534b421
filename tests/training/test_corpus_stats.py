"""Numbers of a packed corpus: what is counted, in which bin, and how the screen shows it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_magi.training.data.corpus import (
    HISTOGRAM_EDGES,
    ByteTokenizer,
    CorpusStats,
    corpus_stats,
    pack,
)
from tests.training.small_corpus import DOCUMENTS, LENGTHS


def test_stats_count_what_was_packed(tmp_path: Path) -> None:
    stats = pack(DOCUMENTS, tmp_path / "c", ByteTokenizer())
    written = json.loads((tmp_path / "c.json").read_text())
    assert written["num_documents"] == stats.num_documents == len(LENGTHS)
    assert written["num_tokens"] == sum(LENGTHS) + len(LENGTHS)
    assert written["length_percentiles"] == {"p50": 18, "p90": 65, "p99": 91, "max": 91}
    assert written["length_histogram"] == {"<=50": 7, "<=100": 2}
    assert "9 documents, 264 tokens" in stats.table()


def stats_of(*lengths: int) -> CorpusStats:
    return corpus_stats(np.array(lengths), ByteTokenizer(), "abc")


@pytest.mark.parametrize("edge", HISTOGRAM_EDGES)
def test_a_length_on_an_edge_is_in_the_bin_below_it(edge: int) -> None:
    below, above = (stats_of(n).length_histogram for n in (edge, edge + 1))
    assert list(below)[-1] == f"<={edge}" and below[f"<={edge}"] == 1
    assert above[f"<={edge}"] == 0 and list(above.values())[-1] == 1


def test_what_is_longer_than_every_edge_has_a_bin() -> None:
    found = stats_of(10**6, 1)
    assert found.length_histogram["longer"] == 1 and sum(found.length_histogram.values()) == 2
    powers = [f"<={1024 * 2**i}" for i in range(8)]
    assert list(found.length_histogram) == ["<=50", "<=100", "<=200", "<=500", *powers, "longer"]


def test_percentiles_are_lengths_of_documents() -> None:
    found = stats_of(*range(101, 0, -1))
    assert found.length_percentiles == {"p50": 51, "p90": 91, "p99": 100, "max": 101}


def test_the_table_has_a_bar_for_the_share_of_every_bin() -> None:
    lines = stats_of(*[10] * 30, *[60] * 15, 1000).table().splitlines()
    assert lines[0] == ("46 documents, 2,200 tokens (byte tokenizer, vocabulary 257, EOD 256)")
    assert lines[2].split() == ["<=50", "30", "65.2%", "#" * 40]
    assert lines[3].split() == ["<=100", "15", "32.6%", "#" * 20]
    assert lines[4].split() == ["<=200", "0", "0.0%"]
    assert lines[-1] == "sha256 abc"
