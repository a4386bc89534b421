"""The benchmark of the deterministic backward, with stand-ins on the CPU."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kernel import deterministic
from benchmarks.kernel.deterministic import MASKS, Deterministic, main, same_bits, unfit
from benchmarks.lib.cell import LEVELS, Case, Inputs
from benchmarks.lib.flash import Flash3


class Fake:
    """A peer whose gradients differ from call to call unless equal bits are asked for."""

    levels = LEVELS

    def __init__(self, obeys: bool = True, reason: str | None = None) -> None:
        self.obeys, self.reason = obeys, reason

    def missing(self) -> str | None:
        return self.reason

    def refuses(self, case: Case, direction: str) -> str | None:
        return "no trees" if case.name == "prefix_tree" and not self.obeys else None

    def call(self, case: Case, direction: str, x: Any) -> Any:
        steps = itertools.repeat(0) if case.deterministic and self.obeys else itertools.count()
        return lambda: (torch.ones(4) + next(steps) * 1e-6,)


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    made = {"ours": Fake(), "fa3": Fake(obeys=False), "fa4": Fake(reason="gone"), "ffa": Fake()}
    monkeypatch.setattr("benchmarks.lib.timing._timed", lambda call: (call(), 1.0))
    times = {"ours": 2.0, "ours_deterministic": 3.0}
    monkeypatch.setattr(
        deterministic,
        "time_calls",
        lambda able, _: {n: [times.get(n, 4.0)] * 3 for n in able},
    )
    monkeypatch.setattr(Inputs, "random", lambda *_: None)
    monkeypatch.setattr(deterministic, "all_peers", lambda: made)
    return made


def test_rows_have_ratios_to_ours_and_say_whose_bits_are_equal(
    peers: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "d.json"
    assert main(["--record", str(path), "--commit", "abc"]) == 0
    said = capsys.readouterr()
    assert "no column fa4: gone" in said.err
    assert said.err.count("without fa3_deterministic: no trees") == 2
    line = said.out.splitlines()[0]
    assert line.startswith("   4096 full") and "ours_deterministic 3.0 ms (1.5)" in line
    stored = json.loads(path.read_text())
    assert stored["meta"]["commit"] == "abc"
    cells = {(r["seqlen"], r["mask"]) for r in stored["rows"]}
    assert cells == set(itertools.product((4096, 16384), MASKS))
    full = {r["impl"]: r for r in stored["rows"] if (r["mask"], r["seqlen"]) == ("full", 4096)}
    assert {n: (r["ratio"], r["same_bits"]) for n, r in full.items()} == {
        "ours": (1.0, False), "ours_deterministic": (1.5, True),
        "fa3_deterministic": (2.0, False), "ffa_deterministic": (2.0, True),
    }  # fmt: skip


def test_a_run_fails_where_our_bits_differ(
    peers: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    peers["ours"].obeys = False
    assert main([]) == 1
    said = capsys.readouterr().err
    assert "ours_deterministic has other bits in another run" in said
    assert "prefix_tree     no ours\n" in said and "no ours_deterministic" in said


def test_only_ours_can_be_unfit() -> None:
    rows = [{"impl": n, "same_bits": False} for n in ("ours", "fa3_deterministic")]
    assert unfit(rows) == ["no ours_deterministic"]


def test_equal_bits_are_those_of_every_repetition() -> None:
    made = iter([1.0, 1.0, 1.0000001])
    assert not same_bits(lambda: (torch.tensor(next(made), dtype=torch.float64),))
    assert same_bits(lambda: (torch.ones(2), torch.zeros(1)))


def test_a_peer_keeps_what_it_refuses() -> None:
    peer = Deterministic(Flash3())
    assert peer.refuses(Case("prefix_tree", 4096), "bwd") == "no bwd for this mask"
    assert peer.refuses(Case("swa1024", 4096), "bwd") is None
