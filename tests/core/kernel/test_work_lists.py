"""Work lists are made ahead where our kernels will run, and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_magi import HeadShape, MagiConfig, masks
from megatron_magi.core.kernel import work_lists
from megatron_magi.core.kernel.slice_table import SliceTable
from megatron_magi.core.kernel.work_lists import make_work_lists

CPU = torch.device("cpu")
HEADS = HeadShape(4, 2, 80)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device on which bf16 runs on our kernels; its tables stay on the CPU."""
    sms = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sms)
    chosen = {torch.bfloat16: "cuda"}
    monkeypatch.setattr(
        work_lists, "choose_backend_name", lambda device, dtype: chosen.get(dtype, "reference")
    )


def made(heads: HeadShape = HEADS, config: MagiConfig | None = None) -> list[set[object]]:
    """What the tables of a forward and a backward hold afterwards."""
    forward, backward = (SliceTable(masks.causal(n).slices, n, n) for n in (64, 96))
    make_work_lists([forward], [backward], heads, config or MagiConfig(), CPU)
    return [set(forward.cache), set(backward.cache)]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("backend", ["auto", "cuda"])
def test_each_direction_has_its_list(backend: str, deterministic: bool) -> None:
    """At the widths to which a call's heads will be padded, in the mode that it will ask for."""
    config = MagiConfig(kernel_backend=backend, deterministic=deterministic)  # type: ignore[arg-type]
    key = (4, 2, 96, 96, CPU)
    assert made(config=config) == [{("fwd", key)}, {("bwd", key, deterministic)}]


def test_values_of_another_width_have_lists_of_their_own() -> None:
    key = (4, 4, 192, 128, CPU)
    latent = HeadShape(4, 4, 192, head_dim_v=128)
    assert made(latent) == [{("fwd", key)}, {("bwd", key, False)}]


@pytest.mark.parametrize(
    "heads, backend",
    [
        (HeadShape(4, 2, 320), "auto"),
        (HeadShape(4, 2, 80, bytes_per_element=4), "auto"),
        (HEADS, "flex"),
        (HEADS, "reference"),
    ],
    ids=["too wide", "fp32", "flex", "reference"],
)
def test_what_other_kernels_run_has_none(heads: HeadShape, backend: str) -> None:
    config = MagiConfig(kernel_backend=backend)  # type: ignore[arg-type]
    assert made(heads, config) == [set(), set()]
