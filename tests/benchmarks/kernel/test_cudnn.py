"""cuDNN's graphs as the kernel benchmark runs them, with a dense stand-in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.kernel import cudnn
from benchmarks.lib.cell import Case, Inputs
from benchmarks.lib.timing import difference
from megatron_magi.core.kernel.head_dims import HeadDims
from tests.benchmarks.kernel.dense_case import SEQLEN, attend, expected


class DenseGraphs:
    """What the frontend's graphs do, written down densely."""

    def __init__(self, case: Case) -> None:
        self.seen = torch.from_numpy(case.mask.to_dense())
        self.forward = SimpleNamespace(run=self.run_forward)
        self.backward = SimpleNamespace(run=self.run_backward)

    def new_stats(self) -> Tensor:
        return torch.zeros(1)

    def run_forward(self, t: dict[str, Tensor]) -> None:
        t["o"].copy_(attend(t["q"], t["k"], t["v"], self.seen))
        t["stats"].fill_(7)

    def run_backward(self, t: dict[str, Tensor]) -> None:
        assert t["stats"] == 7 and t["o"].any()
        with torch.enable_grad():
            leaves = [t[n].detach().requires_grad_() for n in ("q", "k", "v")]
            grads = torch.autograd.grad(attend(*leaves, self.seen), leaves, t["do"])
        for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
            t[name].copy_(grad)


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_cudnns_graphs_run_through_autograd(
    direction: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("packed_causal", SEQLEN)
    x = Inputs.random(SEQLEN, (2, 1), HeadDims(16, 8), "cpu")
    monkeypatch.setattr(cudnn, "_graphs", lambda case, *_: DenseGraphs(case))
    got = cudnn.Cudnn().call(case, direction, x)()
    assert difference(got, expected(case, direction, x)) < 1e-2
    assert got[0].requires_grad == (direction == "fwd")


def test_cudnns_graphs_know_every_row() -> None:
    """Each tensor has the heads and columns of the tensors that a call is given."""
    x = Inputs.random(8, (6, 2), HeadDims(24, 16), "cpu")
    rows = {
        "q": x.q,
        "dq": x.q,
        "k": x.k,
        "dk": x.k,
        "v": x.v,
        "dv": x.v,
        "o": x.dout,
        "do": x.dout,
    }
    shapes = cudnn.row_shapes((6, 2), HeadDims(24, 16))
    assert shapes == {name: tuple(t.shape[1:]) for name, t in rows.items()}
