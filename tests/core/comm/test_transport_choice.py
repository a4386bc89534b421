"""Which transport a group gets, and what happens if memory runs short."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_magi import HeadShape, MagiConfig, dist_attn, masks
from megatron_magi.core.comm import transport_choice
from megatron_magi.core.comm.transport import AllToAll
from megatron_magi.core.comm.transport_choice import engines, transport_for
from megatron_magi.core.plan import AttnPlan, make_attn_plan

HEADS = HeadShape(4, 2, 64)


class Group:
    """In place of a process group."""


class Engine:
    """In place of a CopyEngine, with so many bytes in its slots."""

    name = "symm_mem"

    def __init__(self, group: object, device: torch.device, slot_bytes: int) -> None:
        self.slot_bytes, self.most = slot_bytes, 1 << 24

    def reserve(self, group: object, slot_bytes: int) -> None:
        if slot_bytes > self.most:
            raise RuntimeError("rank 1: out of memory")
        self.slot_bytes = max(self.slot_bytes, slot_bytes)


class OnGpu:
    """In place of a tensor on a GPU."""

    device = torch.device("cuda", 0)
    dtype = torch.bfloat16

    def element_size(self) -> int:
        return 2


LIKE: Any = OnGpu()
WHY_NOT = transport_choice._why_not


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Ranks that can read each other's memory, unless a test appends a reason why not."""
    reasons: list[str] = []
    monkeypatch.setattr(transport_choice, "CopyEngine", Engine)
    monkeypatch.setattr(transport_choice, "_why_not", lambda *_: "".join(reasons))
    monkeypatch.setattr(transport_choice.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(AllToAll, "name", "all_to_all over nccl")
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    yield reasons


def plan(tokens: int = 2048, cp_size: int = 2, **knobs: Any) -> AttnPlan:
    return make_attn_plan(masks.causal(tokens), cp_size, HEADS, MagiConfig(**knobs))


def test_gpus_of_one_host_read_each_other(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="megatron_magi")
    group: Any = Group()
    engine = transport_for(plan(), group, LIKE)
    assert isinstance(engine, Engine) and transport_for(plan(), group, LIKE) is engine
    assert [r.message for r in caplog.records] == ["transport of attention: symm_mem"]
    sent, returned = plan().slot_rows
    assert engine.slot_bytes == 2 * 128 * max(2 * sent, 4 * returned) > 0
    transport_for(plan(4096), group, LIKE)
    sent, returned = plan(4096).slot_rows
    assert engine.slot_bytes == 2 * 128 * max(2 * sent, 4 * returned)
    assert isinstance(transport_for(plan(transport="all_to_all"), group, LIKE), AllToAll)


def test_a_plan_that_exchanges_nothing_opens_nothing() -> None:
    alone = make_attn_plan(masks.from_cu_seqlens([0, 1024, 2048]), 2, HEADS, MagiConfig())
    assert len(alone.transfers) == 0
    group: Any = Group()
    assert isinstance(transport_for(alone, group, LIKE), AllToAll)
    assert group not in transport_choice._engines


def test_what_cannot_is_said_once_and_refused_if_required(
    opened: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="megatron_magi")
    opened.append("ranks on several hosts")
    group: Any = Group()
    for _ in range(2):
        assert isinstance(transport_for(plan(), group, LIKE), AllToAll)
    (line,) = [r.message for r in caplog.records]
    assert line == "transport of attention: all_to_all over nccl (ranks on several hosts)"
    with pytest.raises(
        RuntimeError, match=r"got ranks on several hosts; set MagiConfig\.transport"
    ):
        transport_for(plan(transport="symm_mem"), group, LIKE)


@pytest.mark.parametrize("like", [torch.zeros(1), torch.zeros(1, dtype=torch.float64)])
def test_the_cpu_and_one_rank_have_no_choice(like: torch.Tensor) -> None:
    group: Any = Group()
    assert isinstance(transport_for(plan(), group, like), AllToAll)
    assert transport_for(plan(), None, like) == AllToAll(None)
    with pytest.raises(RuntimeError, match="got tensors on the CPU"):
        transport_for(plan(transport="symm_mem"), group, like)


def test_one_rank_says_once_that_it_does_not_use_what_was_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transport_choice._say_that_nothing_travels.cache_clear()
    heads = HeadShape(2, 2, 64)
    alone = make_attn_plan(masks.causal(64), 1, heads, MagiConfig(transport="symm_mem"))
    q = torch.zeros(64, 2, 64)
    for _ in range(2):
        dist_attn(q, q, q, alone, None)
    (line,) = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert line == "transport symm_mem is not used: one rank exchanges nothing"


def test_a_dtype_that_the_kernels_do_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = Group()
    assert isinstance(transport_for(plan(), group, LIKE), Engine)
    monkeypatch.setattr(OnGpu, "dtype", torch.float32)
    assert isinstance(transport_for(plan(), group, LIKE), AllToAll)
    with pytest.raises(RuntimeError, match=r"got rows in torch\.float32"):
        transport_for(plan(transport="symm_mem"), group, LIKE)


def test_a_call_of_another_kernel_decides_for_itself_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two ranks of one host: a first call in fp32 or with "flex" costs later ones nothing."""
    caplog.set_level(logging.INFO, logger="megatron_magi")
    gathers = []

    def gather(everyone: list[Any], mine: tuple[str, str, bool], group: object) -> None:
        gathers.append(mine)
        everyone[:] = [mine, (mine[0], "another GPU", mine[2])]

    library: list[object] = [None]
    monkeypatch.setattr(transport_choice, "_why_not", WHY_NOT)
    monkeypatch.setattr(transport_choice.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(transport_choice.dist, "all_gather_object", gather)
    monkeypatch.setattr(transport_choice, "loaded_cuda_library", lambda device: library[0])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: SimpleNamespace(uuid="GPU"))
    group: Any = Group()
    flex = plan(kernel_backend="flex")
    for _ in range(2):  # the second call asks no other rank
        assert isinstance(transport_for(flex, group, LIKE), AllToAll)
        assert len(gathers) == len(caplog.records) == 1
    library[0] = object()
    with monkeypatch.context() as patch:
        patch.setattr(OnGpu, "dtype", torch.float32)
        assert isinstance(transport_for(plan(), group, LIKE), AllToAll)
        with pytest.raises(RuntimeError, match="got another kernel than 'cuda', or a dtype"):
            transport_for(plan(transport="symm_mem"), group, LIKE)
    engine = transport_for(plan(transport="symm_mem"), group, LIKE)
    assert isinstance(engine, Engine) and transport_for(plan(), group, LIKE) is engine
    assert len(gathers) == 3


def test_memory_that_runs_short_leaves_the_all_to_all(caplog: pytest.LogCaptureFixture) -> None:
    group: Any = Group()
    engine: Any = transport_for(plan(), group, LIKE)
    engine.most = engine.slot_bytes
    assert isinstance(transport_for(plan(8192), group, LIKE), AllToAll)
    assert "all_to_all from now on (rank 1: out of memory)" in caplog.text
    assert isinstance(transport_for(plan(), group, LIKE), AllToAll)
    with pytest.raises(RuntimeError, match="out of memory"):
        transport_for(plan(transport="symm_mem"), group, LIKE)


def test_the_watcher_sees_engines_only(opened: list[str]) -> None:
    first: Any = Group()
    engine = transport_for(plan(), first, LIKE)
    opened.append("several ranks on one GPU")
    second: Any = Group()
    transport_for(plan(), second, LIKE)
    assert [x for x in engines() if x is engine] == [engine]
    assert all(isinstance(x, Engine) for x in engines())
