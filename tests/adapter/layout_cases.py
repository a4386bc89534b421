"""Layouts of a training run, the run each is compared with, and how they compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

RELATIVE = 2e-5
ADAM_EPS = 1e-6
"""Adam's first step is the same for a gradient of 1e-8 and of 1: with its usual 1e-8 the second
step's gradient norm tells rounding errors of tiny gradients, 4e-5 in one case (3e-7 so)."""

SPREAD = {
    *("tp", "sp", "pp", "vpp", "cp", "dp", "ep", "distributed_optimizer", "overlap", "recompute"),
    *("chunk_size", "overlap_degree", "stock_mtp", "restart_positions", "batched_p2p"),
    *("moved_boundary", "moved_boundary_rank"),
}
"""Fields of a layout that change where and how a run computes, or damage it."""

Run = dict[str, list[float]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A run by its differences from one process, and the attention of the run it is compared to."""

    id: str
    layout: dict[str, Any]
    yardstick: str = "stock"

    @property
    def world(self) -> int:
        sizes = [self.layout.get(name, 1) for name in ("tp", "pp", "cp", "dp")]
        return sizes[0] * sizes[1] * sizes[2] * sizes[3]

    @property
    def microbatches(self) -> int:
        """Two for each replica; a pipeline with many stages is not filled by two."""
        size = self.layout.get
        many = size("dp", 1) > 1 or size("vpp") or size("pp", 1) > 2
        return size("microbatches", 4 if many else 2)

    @property
    def num_layers(self) -> int:
        """Two, or as many as a pipeline has stages."""
        return max(2, self.layout.get("pp", 1) * self.layout.get("vpp", 1))

    def baseline(self) -> Case:
        """The same model and data on one process."""
        kept = {name: value for name, value in self.layout.items() if name not in SPREAD}
        kept |= {"microbatches": self.microbatches, "num_layers": self.num_layers}
        return Case(
            f"{self.yardstick} {sorted(kept.items())}", {**kept, "attention": self.yardstick}
        )

    def job(self) -> dict[str, Any]:
        """For layout_worker."""
        sizes = {"microbatches": self.microbatches, "num_layers": self.num_layers}
        arguments = {"name": self.id, **sizes, **self.layout}
        return {"name": self.id, "function": "train", "kwargs": arguments, "world": self.world}


def run_asked_cases(request: pytest.FixtureRequest, run_jobs: Callable[..., Any]) -> Any:
    """Results of all cases among the parameters of a module's selected tests, and of what they are
    compared with, from one worker process."""
    jobs: dict[str, Any] = {}
    for item in request.session.items:
        params = getattr(item, "callspec", None)
        if item.fspath == request.node.path and params:
            for asked in params.params.values():
                if isinstance(asked, Case):
                    jobs |= {needed.id: needed.job() for needed in (asked.baseline(), asked)}
    return run_jobs(list(jobs.values()))


def values(results: dict[str, Any], case: Case) -> Run:
    """What a case measured, the same on all its ranks."""
    result = results[case.id]
    assert "error" not in result, result["error"]
    first: Run = result["values"][0]
    assert all(max(differences(other, first).values()) < 1e-6 for other in result["values"])
    return first


def differences(got: Run, wanted: Run) -> dict[str, float]:
    """Largest relative difference over steps, of every kind of number."""
    assert got.keys() == wanted.keys() >= {"loss", "grad_norm"}
    return {
        key: max(abs(a - b) / abs(b) for a, b in zip(got[key], wanted[key], strict=True))
        for key in got
    }
