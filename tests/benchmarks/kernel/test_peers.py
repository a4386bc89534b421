"""The benchmark's peers are asked for the mask they are measured on: shown with stand-ins that are
written down densely, on the CPU."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.kernel import cudnn, peers, speed
from benchmarks.kernel.peers import Flex, Ours
from benchmarks.lib.cell import Case, Inputs
from benchmarks.lib.flash import Ffa, Flash3, Flash4
from benchmarks.lib.masks import MASKS, block_causal
from benchmarks.lib.timing import Budget, difference, rounds, row
from megatron_magi import AttnMask
from megatron_magi.core.kernel.backend import GradCall
from megatron_magi.core.kernel.head_dims import HeadDims
from megatron_magi.core.kernel.reference import ReferenceBackend
from megatron_magi.core.mask.slices import slices_from_ranges
from tests.benchmarks.kernel.dense_case import SEQLEN, attend, expected

ASKED: list[bool] = []
"""Whether the calls of the stand-ins were asked for equal bits."""
DOCUMENT_MASKS = ["full", "causal", "packed_full", "packed_causal", "swa1024", "tiny64"]


def upstream_rule(num_q: int, num_k: int, causal: bool, window: tuple[int, int]) -> Tensor:
    """As FlashAttention documents it; -1: no bound."""
    off = torch.arange(num_k)[None] - torch.arange(num_q)[:, None] - (num_k - num_q)
    seen = off <= 0 if causal else torch.ones(num_q, num_k, dtype=torch.bool)
    left, right = window
    seen = seen & (off >= -left) if left >= 0 else seen
    return seen & (off <= right) if right >= 0 else seen


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, deterministic: bool = False,
) -> Tensor:  # fmt: skip
    ASKED.append(deterministic)
    seen = upstream_rule(q.shape[1], k.shape[1], causal, window_size)
    return torch.stack([attend(*one, seen, softcap) for one in zip(q, k, v, strict=True)])


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, seqused_k: Tensor | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, deterministic: bool = False,
) -> tuple[Tensor, None]:  # fmt: skip
    ASKED.append(deterministic)
    parts = []
    used = cu_seqlens_k.diff() if seqused_k is None else seqused_k
    for i, (begin, end) in enumerate(pairwise(cu_seqlens_q)):
        assert end - begin <= max_seqlen_q and used[i] <= max_seqlen_k
        keys = slice(int(cu_seqlens_k[i]), int(cu_seqlens_k[i] + used[i]))
        seen = upstream_rule(int(end - begin), int(used[i]), causal, window_size)
        parts.append(attend(q[begin:end], k[keys], v[keys], seen, softcap))
    return torch.cat(parts), None


def flex_flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, q_ranges: Tensor, k_ranges: Tensor, attn_type_map: Tensor,
    softcap: float = 0.0, deterministic: bool = False,
) -> tuple[Tensor, None]:  # fmt: skip
    ASKED.append(deterministic)
    slices = slices_from_ranges(q_ranges.numpy(), k_ranges.numpy(), attn_type_map.numpy())
    seen = AttnMask(slices, len(q), len(k)).to_dense()
    return attend(q, k, v, torch.from_numpy(seen), softcap), None


STAND_IN = SimpleNamespace(
    flash_attn_func=flash_attn_func,
    flash_attn_varlen_func=flash_attn_varlen_func,
    flex_flash_attn_func=flex_flash_attn_func,
)


@pytest.fixture(params=[Flash3, Flash4, Ffa])
def peer(request: pytest.FixtureRequest) -> Any:
    made = request.param()
    made.package = STAND_IN
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MASKS))
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("softcap", [0.0, 0.5])
def test_a_peer_computes_the_mask_or_refuses(
    peer: Any, name: str, direction: Any, softcap: float
) -> None:
    case = Case(name, SEQLEN, softcap=softcap)
    x = Inputs.random(SEQLEN, (2, 1), HeadDims(16, 8), "cpu")
    if peer.refuses(case, direction) is not None:
        assert name not in DOCUMENT_MASKS
        return
    got = peer.call(case, direction, x)()
    assert difference(got, expected(case, direction, x)) < 1e-2


@pytest.mark.parametrize("name", ["causal", "packed_causal"])
def test_a_peer_is_asked_for_equal_bits(peer: Any, name: str) -> None:
    x = Inputs.random(SEQLEN, (2, 1), HeadDims(16, 16), "cpu")
    for deterministic in (False, True):
        ASKED.clear()
        peer.call(Case(name, SEQLEN, deterministic=deterministic), "bwd", x)()
        assert len(ASKED) == 1 and ASKED[0] is deterministic


@pytest.mark.parametrize("way", [Ours.call, Ours.below_autograd])
@pytest.mark.parametrize("deterministic", [False, True])
def test_ours_is_asked_for_equal_bits(
    way: Any, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, backward = [], ReferenceBackend.backward

    def watched(self: Any, call: Any, grad: GradCall) -> Any:
        asked.append(grad.deterministic)
        return backward(self, call, grad)

    monkeypatch.setattr(ReferenceBackend, "backward", watched)
    x = Inputs.random(SEQLEN, (2, 1), HeadDims(16, 16), "cpu")
    way(Ours("reference"), Case("causal", SEQLEN, deterministic=deterministic), "bwd", x)()
    assert asked == [deterministic]


def test_who_cannot_be_asked_refuses() -> None:
    for peer in (Flex(), cudnn.Cudnn()):
        assert "deterministic" in str(peer.refuses(Case("full", 64, deterministic=True), "bwd"))
    assert "softcap" in str(cudnn.Cudnn().refuses(Case("full", 64, softcap=9), "fwd"))
    assert Flex().refuses(Case("full", 64, softcap=9), "fwd") is None


def test_flash3_takes_block_causal_documents_forward_only() -> None:
    case = Case("packed_block_causal", SEQLEN)
    assert Flash3().refuses(case, "fwd") is None
    assert Flash3().refuses(case, "bwd") is not None
    assert Flash4().refuses(case, "fwd") is not None


def test_block_causal_covers_the_mask() -> None:
    for seqlen in (4096, 16384):
        blocks = block_causal(seqlen)
        seen = np.zeros((seqlen, seqlen), dtype=np.bool_)
        for i, (begin, end) in enumerate(pairwise(blocks.cu_queries)):
            first = blocks.first_keys[i]
            seen[begin:end, first : first + blocks.num_keys[i]] = True
        assert (seen == MASKS["packed_block_causal"](seqlen).to_dense()).all()
        assert blocks.first_keys[-1] == seqlen and blocks.longest_query <= 2048


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MASKS))
@pytest.mark.parametrize("softcap", [0.0, 0.5])
def test_flex_takes_every_mask(name: str, softcap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(peers, "_compiled_flex", lambda case: flex_attention)
    monkeypatch.setattr(Inputs, "leaves", lambda x: [x.q, x.k, x.v])  # no gradient on the CPU
    case = Case(name, SEQLEN, softcap=softcap)
    x = Inputs.random(SEQLEN, (2, 1), HeadDims(16, 16), "cpu")
    want = attend(x.q, x.k, x.v, torch.from_numpy(case.mask.to_dense()), softcap)
    assert difference(Flex().call(case, "fwd", x)(), (want,)) < 1e-2


def test_a_peer_that_is_not_there_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Flash3, "module", "no_such_module")
    args = speed.options(["--impls", "ours,fa3"])
    assert list(speed.importable(args)) == ["ours"]
    assert "no column fa3: no_such_module cannot be imported" in capsys.readouterr().err


class Fake:
    """A peer that computes one number, breaks at 0 and refuses below."""

    def __init__(self, value: float) -> None:
        self.value = value

    def missing(self) -> str | None:
        return None

    def refuses(self, case: Case, direction: str) -> str | None:
        return "too tired" if self.value < 0 else None

    def call(self, case: Case, direction: str, x: Inputs) -> Any:
        if self.value == 0:
            raise RuntimeError("broken")
        return lambda: (torch.full((4,), self.value),)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.lib.timing._timed", lambda call: (call(), 1.0))
    monkeypatch.setattr(speed, "time_calls", lambda able, _: {n: [2.0] * 3 for n in able})
    monkeypatch.setattr(Inputs, "random", lambda *_: None)


def run(path: Path, *arguments: str) -> int:
    return speed.main(["--masks", "full,causal", "--record", str(path), *arguments])


def test_a_run_records_what_ran_and_says_what_did_not(
    no_gpu: None, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    peers = {"ours": Fake(1.0), "cudnn": Fake(1.0), "flex": Fake(-1.0)}
    monkeypatch.setattr(speed, "all_peers", lambda: peers)
    assert run(tmp_path / "k.json", "--commit", "abc") == 0
    said = capsys.readouterr()
    assert " ".join(said.out.splitlines()[0].split()) == "fwd 16384 full ours 4398 cudnn 4398"
    assert "bwd   16384 causal               without flex: too tired" in said.err
    stored = json.loads((tmp_path / "k.json").read_text())
    assert len(stored["rows"]) == 8 and stored["meta"]["commit"] == "abc"
    fields = "date gpu driver torch cuda cudnn commit clocks command"
    assert " ".join(stored["meta"]) == fields


def test_a_run_ends_in_time_and_fails_with_ours(
    no_gpu: None, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    peers = {"ours": Fake(0.0), "cudnn": Fake(1.0)}
    monkeypatch.setattr(speed, "all_peers", lambda: peers)
    assert run(tmp_path / "k.json") == 1
    assert "without ours: RuntimeError: broken" in capsys.readouterr().err
    peers["ours"] = Fake(2.0)
    assert run(tmp_path / "k.json") == 1
    assert "without cudnn: its outputs differ from those of ours" in capsys.readouterr().err
    assert run(tmp_path / "k.json", "--seconds", "1e-9") == 0
    assert capsys.readouterr().err.count("skipped") == 4


def test_a_wrong_or_broken_peer_is_left_out(no_gpu: None) -> None:
    peers = {n: Fake(v) for n, v in dict(a=1.0, b=1.001, c=2.0, d=0.0, e=-1.0).items()}
    able, left_out = speed.run_cell(peers, Case("full", 64), "fwd", [None, None])
    assert list(able) == ["a", "b"] and list(left_out) == ["c", "d", "e"]
    assert "differ" in left_out["c"] and "broken" in left_out["d"]
    assert not difference((torch.tensor([float("nan")]),), (torch.ones(1),)) < 1


def test_long_cells_take_fewer_rounds() -> None:
    budget = Budget(rounds=7, cell_seconds=3.0)
    assert [budget.rounds_of(ms) for ms in (0.1, 600.0, 5000.0)] == [7, 5, 3]


def test_rows_have_the_records_fields() -> None:
    made = row(8e12, [2.0, 1.0, 4.0])
    assert made == {"tflops": 4000.0, "ms": 2.0, "min_ms": 1.0, "max_ms": 4.0, "n": 3}


@pytest.mark.parametrize("way", [Ours.call, Ours.below_autograd])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("softcap", [0.0, 0.5])
def test_ours_computes_the_mask(way: Any, direction: Any, softcap: float) -> None:
    case = Case("packed_causal", SEQLEN, softcap)
    x = Inputs.random(SEQLEN, (2, 1), HeadDims(16, 16), "cpu")
    got = way(Ours("reference"), case, direction, x)()
    assert [t.requires_grad for t in got] == [way is Ours.call and direction == "fwd"] * len(got)
    assert difference(got, expected(case, direction, x)) < 1e-2


def test_all_forwards_through_autograd_record_a_graph(peer: Any) -> None:
    """None is spared what the others do."""
    case, x = Case("packed_causal", SEQLEN), Inputs.random(SEQLEN, (2, 1), HeadDims(16, 16), "cpu")
    (out,) = peer.call(case, "fwd", x)()
    assert out.requires_grad


def test_the_softcap_reaches_every_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inputs, "random", lambda *_: None)
    args = speed.options(["--masks", "full", "--softcap", "30"])
    assert [case.softcap for case, _, _ in speed.cells(args)] == [30.0, 30.0]


def test_every_round_has_an_order_of_its_own() -> None:
    names = ["ours", "cudnn", "fa3", "flex"]
    made = [[name for turn, name in rounds(names, 20) if turn == i] for i in range(20)]
    assert all(sorted(order) == sorted(names) for order in made)
    firsts = {order[0] for order in made}
    behind = {a for order in made for a, b in pairwise(order) if b == "ours"}
    assert firsts == set(names) and len(behind) == 3
    assert list(rounds(names, 20)) == list(rounds(names, 20))
