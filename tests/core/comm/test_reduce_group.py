"""How a communicator for reduces is made from its parent's, for backends that are not here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch

from megatron_magi import HeadShape, MagiConfig, masks
from megatron_magi.core.comm import reduce_group as module
from megatron_magi.core.comm.transport import AllToAll
from megatron_magi.core.comm.transport_choice import transport_of_reduces
from megatron_magi.core.plan import make_attn_plan

GPU = torch.device("cuda", 0)
PLAN = make_attn_plan(masks.causal(64), 2, HeadShape(2, 1, 4), MagiConfig())
LIKE: Any = SimpleNamespace(device=GPU)


class Nccl:
    """In place of ProcessGroupNCCL."""

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self._timeout, self.config = timedelta(seconds=600), "default"
            self.global_ranks_in_group: list[int] = []
            self.split_from = self.split_color = None

    def __init__(self, store: str, rank: int, size: int, options: Options) -> None:
        self.store, self.rank, self.size, self.options = store, rank, size, options
        self.ended = 0

    def shutdown(self) -> None:
        self.ended += 1


class Group:
    """In place of a process group over NCCL that was split from the job's."""

    group_name = "7"

    def __init__(self, backend: Any = None) -> None:
        options = Nccl.Options(is_high_priority_stream=True)
        options._timeout, options.config = timedelta(seconds=77), "four channels"
        options.global_ranks_in_group, options.split_from = [2, 5], "the job's"
        self.backend = backend or Nccl("theirs", 1, 2, options)

    def _get_backend(self, device: torch.device) -> Any:
        return self.backend


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Any]]:
    """The groups that have ended."""
    ended: set[Any] = set()
    monkeypatch.setattr(module.dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(module.dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(module.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(module, "rendezvous_store", lambda group, purpose: f"store of {purpose}")
    monkeypatch.setattr(module, "is_alive", lambda group: group not in ended)
    monkeypatch.setattr(module, "_opened", WeakKeyDictionary())
    yield ended


def opened(group: Any) -> Any:
    made = module.reduce_group(group, GPU, 5.0)
    return None if made is None else made.backend


def test_nccl_gets_the_parents_options_but_is_not_split_from_it() -> None:
    """A split is a collective call of all ranks of the job."""
    made = opened(Group())
    assert (made.store, made.rank, made.size) == ("store of reduces/cuda", 1, 2)
    options = made.options
    assert options._timeout == timedelta(seconds=77) and options.config == "four channels"
    assert options.is_high_priority_stream and options.global_ranks_in_group == [2, 5]
    assert options.split_from is None and options.split_color is None


def test_it_is_made_once_and_ends_with_its_parent(job: set[Any]) -> None:
    first, second = Group(), Group()
    made, other = opened(first), opened(second)
    assert opened(first) is made is not other
    job.add(first)
    opened(Group())
    assert made.ended == 1 and other.ended == 0
    assert module._opened[first]["cuda"].backend is None  # type: ignore[index, union-attr]


def test_the_end_of_the_process_waits_for_no_peer(job: set[Any]) -> None:
    alive, ended = Group(), Group()
    left, closed = opened(alive), opened(ended)
    job.add(ended)
    module._leave_all()
    assert (left.ended, closed.ended) == (0, 1)
    del alive
    assert left.ended == 0


def test_an_exchange_is_asynchronous() -> None:
    """NCCL would otherwise keep the current stream waiting for it."""
    asked: list[Any] = []
    backend = SimpleNamespace(alltoall_base=lambda *given: asked.append(given))
    send, recv = torch.zeros(3), torch.zeros(2)
    module.ReduceGroup(backend).all_to_all(recv, send, [2, 0], [1, 2])
    ((*given, options),) = asked
    assert given[0] is recv and given[1] is send and given[2:] == [[2, 0], [1, 2]]
    assert getattr(options, "asyncOp", True) is True


@pytest.mark.parametrize("in_child", [False, True])
def test_threads_of_gloo_and_of_a_parent_process_are_never_joined(in_child: bool) -> None:
    """They may wait for peers that are gone, or do not exist here. Whoever drops the last reference
    joins them."""
    gloo = module.dist.ProcessGroupGloo(module.dist.HashStore(), 0, 1, timedelta(seconds=5))
    for backend, stays in ((gloo, True), (Nccl("", 0, 1, Nccl.Options()), in_child)):
        group = module.ReduceGroup(backend)
        before = sys.getrefcount(backend)
        group.leave(in_child=in_child)
        assert group.backend is None
        assert sys.getrefcount(backend) == before - (0 if stays else 1)


def test_a_group_that_is_forgotten_ends_it() -> None:
    group = Group()
    made = opened(group)
    del group
    assert made.ended == 1


def test_other_backends_and_groups_that_share_have_none() -> None:
    assert opened(Group(SimpleNamespace(options=None))) is None
    group: Any = Group()
    module.share_communicator(group)
    assert opened(group) is None
    shared = transport_of_reduces(AllToAll(group), PLAN, LIKE, 9)
    assert shared == AllToAll(group)


def test_from_four_casts_on_reduces_have_a_communicator() -> None:
    group: Any = Group()
    casts = AllToAll(group)
    for few in range(4):
        assert transport_of_reduces(casts, PLAN, LIKE, few) is casts
    assert group not in module._opened
    reduces = transport_of_reduces(casts, PLAN, LIKE, 4)
    assert isinstance(reduces, AllToAll) and reduces.communicator is module._opened[group]["cuda"]


def test_one_rank_and_copy_engines_have_none() -> None:
    alone, engine = AllToAll(None), SimpleNamespace(name="symm_mem")
    assert transport_of_reduces(alone, PLAN, LIKE, 9) is alone
    assert transport_of_reduces(engine, PLAN, LIKE, 9) is engine  # type: ignore[arg-type]
