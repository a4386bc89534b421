"""The benchmark of options, with stand-ins on the CPU."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kernel import options
from benchmarks.kernel.options import Deterministic, main, rows_of, same_bits, unfit
from benchmarks.lib.cell import Case, Inputs
from benchmarks.lib.flash import Flash3
from megatron_magi.core.kernel.head_dims import HeadDims

MASKS = options.OPTIONS["deterministic"].masks


class Timed:
    """In place of the kernels: notes what is asked of them."""

    def __init__(self) -> None:
        self.asked: list[tuple[Case, str, float]] = []

    def below_autograd(self, case: Case, direction: str, x: Inputs) -> Any:
        self.asked.append((case, direction, x.q.flatten()[0].item()))
        return lambda: (torch.zeros(1),)


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls run and take the same time; nothing is drawn on a GPU."""
    ones = torch.ones(2, 1, 4)
    monkeypatch.setattr("benchmarks.lib.timing._timed", lambda call: (call(), 1.0))
    monkeypatch.setattr(Inputs, "random", lambda *_: Inputs(ones, ones, ones, ones))


def test_calls_differ_in_the_softcap_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed, path = Timed(), tmp_path / "s.json"
    monkeypatch.setattr(options, "Ours", lambda: timed)
    times = {"without": [2.0, 2.0, 9.0], "softcap": [3.0, 1.0, 3.0]}
    monkeypatch.setattr(options, "time_calls", lambda able, _: {n: times[n] for n in able})
    argv = ["softcap", "--record", str(path), "--commit", "abc", "--softcap", "50"]
    cells = ["--sizes", "1", "20", "--head-dims", "64", "--masks", "causal", "--seqlens", "128"]
    assert main([*argv, *cells]) == 0
    record = json.loads(path.read_text())
    assert record["meta"]["softcap"] == 50 and record["meta"]["commit"] == "abc"
    rows = record["rows"]
    assert [(row["size"], row["direction"]) for row in rows] == [
        (size, direction) for size in (1.0, 20.0) for direction in ("fwd", "bwd", "deterministic")
    ]
    assert all(row["ratio"] == 1.5 and row["n"] == 3 for row in rows)
    for (without, *given), (capped, *same) in zip(timed.asked[::2], timed.asked[1::2], strict=True):
        assert (without.softcap, capped.softcap) == (0.0, 50.0) and given == same
        assert without.deterministic == capped.deterministic
    sizes = [x for _, _, x in timed.asked]
    assert sizes == [1.0] * 6 + [20.0] * 6
    assert [case.deterministic for case, *_ in timed.asked[:6]] == [False] * 4 + [True] * 2


def test_a_row_has_medians_spread_and_their_ratio() -> None:
    times = {"without": [1.0, 2.0, 4.0], "softcap": [3.0, 3.0, 5.0]}
    flops = Case("full", 1000).flops(4, HeadDims(64, 64), "fwd")
    (row,) = rows_of({}, flops, times, is_pair=True)
    assert row["ratio"] == 1.5 and row["without"]["min_ms"] == 1.0
    assert row["softcap"]["max_ms"] == 5.0
    assert row["without"]["tflops"] == round(flops / 2.0 / 1e9, 1)
    one, two = rows_of({"mask": "full"}, flops, times, is_pair=False)
    assert (one["impl"], one["ms"], one["ratio"]) == ("without", 2.0, 1.0)
    assert two == {"mask": "full", "impl": "softcap", **row["softcap"], "ratio": 1.5}


class Fake:
    """A peer whose gradients differ from call to call unless equal bits are asked for."""

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
    times = {"ours": 2.0, "ours_deterministic": 3.0}
    monkeypatch.setattr(
        options, "time_calls", lambda able, _: {n: [times.get(n, 4.0)] * 3 for n in able}
    )
    monkeypatch.setattr(options, "all_peers", lambda: made)
    return made


def test_rows_have_ratios_to_ours_and_say_whose_bits_are_equal(
    peers: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "d.json"
    assert main(["deterministic", "--record", str(path), "--commit", "abc"]) == 0
    said = capsys.readouterr()
    assert "no column fa4: gone" in said.err
    assert said.err.count("without fa3_deterministic: no trees") == 2
    assert "128 full 4096 bwd ours_deterministic 3.0 1.5 True" in said.out
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
    assert main(["deterministic"]) == 1
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


@pytest.mark.parametrize("impl", options.SINKS)
def test_sinks_join_inside_the_kernel_and_after_it_alike(
    impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, drawn = options.flex_flash_attn_func, torch.randn
    monkeypatch.setattr(options, "flex_flash_attn_func",
                        lambda *a, **k: attend(*a, **{**k, "backend": "reference"}))  # fmt: skip
    monkeypatch.setattr(torch, "randn", lambda *s, device=None, **k: drawn(*s, **k))
    at = options.Setting(HeadDims(64, 64), Case("causal", 16), options.arguments(["sink"]))
    x = Inputs(*(drawn(16, heads, 64, dtype=torch.bfloat16) for heads in (64, 8, 8, 64)))
    calls = {}
    for name in (impl, impl.removeprefix("after_")):
        torch.manual_seed(0)
        calls[name] = options.sink_calls(name, at, x)
    for direction in ("fwd", "bwd"):
        one, *rest = (made[direction]() for made in calls.values())
        for other in rest:
            for a, b in zip(one, other, strict=True):
                assert (a - b).norm() < 0.02 * b.norm() + 1e-6
