"""Routers replay a rollout's choices on the rows that they were made for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_magi.adapter.packed import make_packed_seq_params
from megatron_magi.adapter.routing_replay import dispatch_routing, gather_routing
from tests.adapter.test_other_layers import SP, job
from tests.adapter.test_packed import model
from tests.megatron_worker import run_jobs_of

JOBS = Path(__file__).parent / "adapter_jobs.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pieces = {"chunk_size": 8}
    layouts: dict[str, dict[str, Any]] = {
        "one": {},
        "cp2": {"cp": 2, **pieces},
        "tp2 sp cp2": {**SP, **pieces},
    }
    jobs = [job(name, "replay", **layout) for name, layout in layouts.items()]
    return run_jobs_of(JOBS, jobs, tmp_path_factory.mktemp("replay"), 200)


@pytest.mark.parametrize("name", ["cp2", "tp2 sp cp2"])
def test_every_layout_has_the_losses_of_one_process(results: dict[str, Any], name: str) -> None:
    for each in ("one", name):
        assert "error" not in results[each], results[each]["error"]
    wanted = results["one"]["values"][0]
    for got in results[name]["values"]:
        assert got["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        assert got["recorded"] == wanted["recorded"]
        assert not got["is_contiguous"], "else rows need no dispatch"


def test_other_lengths_and_kinds_are_refused() -> None:
    packed = make_packed_seq_params([0, 5, 16], model(), None, device="cpu")
    with pytest.raises(ValueError, match="16"):
        dispatch_routing([torch.zeros(15, 2)], packed, None)
    wrong: Any = "indices"
    with pytest.raises(TypeError, match="expert indices must be a Tensor"):
        gather_routing([wrong], packed, None)
    with pytest.raises(TypeError, match="packed must be a MagiPackedSeqParams"):
        dispatch_routing([], SimpleNamespace(), None)  # type: ignore[arg-type]
