"""What the tests of exchanges among nodes run on every rank. Each function asserts by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import megatron_magi as magi
from megatron_magi import masks
from megatron_magi.core.comm import transport
from megatron_magi.core.native import solver
from megatron_magi.core.plan import AttnPlan, NodeCastPlan, attn_plan, token_layout
from megatron_magi.core.runtime.agreement.comparison import AgreementError
from tests.core.runtime.gpu_jobs import on_gpus
from tests.core.runtime.runtime_jobs import (
    NAMED,
    SHAPE,
    check_against_dense,
    run_attention,
    staged,
)
from tests.knobs import magi_config
from tests.process_pool import on_subgroup, subgroup


@on_subgroup
def bytes_by_link(rank: int, group: Any, per_node: int, degree: int | str) -> None:
    """The bytes that each link carries are the plan's, and fewer cross than with one all-to-all."""
    mask = masks.from_cu_seqlens([0, 90, 100, 170, 256])
    for nodes in (per_node, None):
        config = staged(degree, ranks_per_node=nodes)
        plan = magi.plan(mask, group, SHAPE, config)
        with counted(group, per_node) as sent:
            run_attention(mask, config, group, torch.float32, 0)
        row = SHAPE.kv_row_elements * 4
        inside, between = rows_by_link(plan, per_node)
        # The cast forward, the cast backward and the reduce, in fp32 each: the reduce goes back
        # along the same links.
        mine = torch.tensor([sent["inside"], sent["between"]])
        dist.all_reduce(mine, group=group)
        assert mine.tolist() == [3 * row * inside, 3 * row * between], (nodes, mine.tolist())
        if nodes is not None:
            across = between
        else:
            assert across < between, (across, between)


def rows_by_link(plan: AttnPlan, per_node: int) -> tuple[int, int]:
    """Rows of all ranks on links inside nodes and between nodes, by the plan's transfers."""
    inside = between = 0
    for stage in range(plan.num_stages):
        transfers = plan.transfers[plan.transfers[:, 0] == stage]
        _, dst, src, start, end = transfers.T
        crosses, rows = dst // per_node != src // per_node, end - start
        if not plan.ranks_per_node:
            inside += int(rows[~crosses].sum())
            between += int(rows[crosses].sum())
            continue
        relay = dst // per_node * per_node + src % per_node
        inside += int(rows[(src != dst) & ~crosses].sum() + rows[crosses & (relay != dst)].sum())
        legs = solver.crossing_leg(transfers, per_node)
        between += int((legs[:, 4] - legs[:, 3]).sum())
    return inside, between


@contextmanager
def one_rank_a_node() -> Iterator[None]:
    """Exchanges in two steps although every rank has a node of its own: nothing is left to spread,
    so that one host of two GPUs has all that differs from one exchange."""
    with (
        mock.patch.object(attn_plan, "ranks_per_node", lambda config, cp_size: 1),
        mock.patch.object(token_layout, "ranks_per_node", lambda config, cp_size: 1),
    ):
        yield


def alone_on_nodes(rank: int, cp_size: int, degree: int | str) -> None:
    group = subgroup(cp_size)
    with one_rank_a_node():
        if rank < cp_size:
            config = staged(degree, ranks_per_node=1)
            check_against_dense(NAMED["packed"], config, group, torch.float64, 2)
            plan = magi.plan(NAMED["packed"], group, SHAPE, config)
            casts = [stage.cast for stage in plan.rank_plan(rank).stages if stage.cast]
            assert casts and all(isinstance(cast, NodeCastPlan) for cast in casts)


def on_gpus_as_nodes(rank: int, name: str, degree: int | str, widths: tuple[int, int]) -> None:
    with one_rank_a_node():
        on_gpus(rank, name, degree, widths, torch.bfloat16, {"ranks_per_node": 1})


@contextmanager
def counted(group: Any, per_node: int) -> Iterator[Counter[str]]:
    """Bytes that this rank's exchanges send to ranks of its node and of others."""
    sent: Counter[str] = Counter()
    whole, rank = dist.get_process_group_ranks(group), dist.get_rank()
    place = {one: number // per_node for number, one in enumerate(whole)}
    plain = dist.all_to_all_single

    def spy(into: Any, given: Any, recv: list[int], send: list[int], **kwargs: Any) -> Any:
        size = given.shape[1] if given.ndim > 1 else 0
        for peer, rows in zip(dist.get_process_group_ranks(kwargs["group"]), send, strict=True):
            if peer != rank:
                link = "inside" if place[peer] == place[rank] else "between"
                sent[link] += rows * size
        return plain(into, given, recv, send, **kwargs)

    with mock.patch.object(transport.dist, "all_to_all_single", spy):
        yield sent


@on_subgroup
def equal_bits(rank: int, group: Any, per_node: int) -> None:
    config = staged(2, ranks_per_node=per_node)
    runs = [run_attention(NAMED["packed"], config, group, torch.float32, 3)[0] for _ in range(2)]
    for name, x in runs[0].items():
        assert torch.equal(x, runs[1][name]), name


def mesh_names_its_nodes(rank: int, cp_size: int) -> None:
    """A mesh of [nodes, ranks of a node] is used as both: its groups, and fewer rows."""
    names = ("node", "rank")
    shapes = ((2, cp_size // 2), (1, cp_size))
    meshes = [init_device_mesh("cpu", shape, mesh_dim_names=names) for shape in shapes]
    for mesh, wanted in zip(meshes, (cp_size // 2, 0), strict=True):
        plan = magi.plan(NAMED["causal"], mesh, SHAPE, magi_config())
        assert (plan.cp_size, plan.ranks_per_node) == (cp_size, wanted)
        check_against_dense(NAMED["packed"], magi_config(), mesh, torch.float64, 5)
    try:
        magi.plan(NAMED["causal"], meshes[0], SHAPE, magi_config(ranks_per_node=1))
    except ValueError as error:
        assert "must be that of the mesh" in str(error)
    else:
        raise AssertionError("two answers to how many ranks share a node")


@on_subgroup
def ranks_with_other_nodes(rank: int, group: Any) -> str:
    config = magi_config(ranks_per_node=2 if rank else None)
    try:
        run_attention(NAMED["causal"], config, group, torch.float32, 0)
    except AgreementError as error:
        return str(error)
    return "no error"
