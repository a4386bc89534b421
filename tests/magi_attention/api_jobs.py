"""What the API tests run on every rank, written as a user would write it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_magi import AttnMask, masks
from megatron_magi import magi_attention as api
from tests.dense import NAMES, assert_as_good_as_dense, dense_attention, dense_largest, random_qkv
from tests.magi_attention.test_kernel_call import sink_attention
from tests.magi_attention.typed_masks import count_cells, random_typed
from tests.process_pool import on_subgroup, subgroup

HEADS = (4, 2, 8)
"""Query heads, key/value heads, head_dim."""


def config(degree: int | None, chunk_size: int | None = None) -> api.DistAttnConfig:
    mode = api.AttnOverlapMode.DYNAMIC if degree is None else api.AttnOverlapMode.STATIC
    return api.DistAttnConfig(
        dispatch_config=api.DispatchConfig(chunk_size=chunk_size, alg=api.MinHeapDispatchAlg()),
        overlap_config=api.OverlapConfig(mode=mode, degree=degree, alg=api.UniformOverlapAlg()),
    )


def attend(
    key_for_dispatch: api.DistAttnRuntimeKey, key: api.DistAttnRuntimeKey, qkv: Any, dout: Tensor
) -> dict[str, Tensor]:
    """Dispatch q, k, v, attend with ``key``, undispatch, backward: full tensors."""
    out_local, meta = api.calc_attn(*(api.dispatch(x, key_for_dispatch) for x in qkv), key)
    out, lse = api.undispatch(out_local, key), api.undispatch(meta.lse, key)
    return dict(zip(NAMES, (out, lse, *torch.autograd.grad(out, qkv, dout)), strict=True))


def check(ours: dict[str, Tensor], mask: AttnMask, q: Any, k: Any, v: Any, dout: Tensor) -> None:
    assert_as_good_as_dense(ours, (q, k, v, dout), mask, torch.float64)


@on_subgroup
def random_types(rank: int, group: Any, seeds: list[int]) -> None:
    for seed in seeds:
        length = 1 + seed % 23
        typed = random_typed(seed, length)
        mask = masks.from_dense(count_cells(typed, length, length) > 0)
        key = api.magi_attn_flex_key(
            *typed, length, length, *HEADS, pad_size=0, cp_group_or_mesh=group,
            dist_attn_config=config((0, 1, 2, None)[seed % 4]),
        )  # fmt: skip
        q, k, v, dout = random_qkv(mask, *HEADS, torch.float64, seed)
        try:
            check(attend(key, key, (q, k, v), dout), mask, q, k, v, dout)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, cp {group.size()}: {error}") from error


class TinyAttention(torch.nn.Module):
    """Projections around attention, equal on every rank."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, heads in zip("qkv", (4, 2, 2), strict=True):
            weight = torch.randn(heads * 8, 16, generator=generator, dtype=torch.float64) / 4
            self.register_parameter(name, torch.nn.Parameter(weight))

    def project(self, x: Tensor) -> list[Tensor]:
        return [(x @ p.T).unflatten(-1, (-1, 8)) for p in (self.q, self.k, self.v)]


@on_subgroup
def train_step(rank: int, group: Any, use_flex: bool) -> None:
    """varlen or flex key -> dispatch -> projections -> calc_attn -> undispatch -> loss."""
    cu_seqlens = torch.tensor([0, 11, 30, 53], dtype=torch.int32)
    total = int(cu_seqlens[-1])
    if use_flex:
        ranges = api.AttnRanges.from_ranges([[0, 11], [11, 30], [30, 53]])
        key = api.magi_attn_flex_key(
            q_ranges=ranges, k_ranges=ranges, attn_mask_type="causal",
            total_seqlen_q=total, total_seqlen_k=total, num_heads_q=4, num_heads_kv=2, head_dim=8,
            pad_size=0, cp_group_or_mesh=group,
        )  # fmt: skip
    else:
        key = api.magi_attn_varlen_key(
            cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, num_heads_q=4, num_heads_kv=2,
            head_dim=8, pad_size=0, cp_group_or_mesh=group, causal=True,
            dist_attn_config=config(2, chunk_size=4),
        )  # fmt: skip
        assert key.chunk_size == 4 and key.pad_size == -total % (4 * group.size())
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(total, n, generator=generator, dtype=torch.float64) for n in (16, 32))

    model = TinyAttention()
    out, _ = api.calc_attn(*model.project(api.dispatch(x, key)), key)
    full = api.undispatch(out.flatten(1), key)
    ((full - target) ** 2).mean().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)

    alone = TinyAttention()
    mask = masks.from_cu_seqlens(cu_seqlens)
    dense, _ = dense_attention(*alone.project(x), mask, 8**-0.5)
    ((dense.flatten(1) - target) ** 2).mean().backward()
    torch.testing.assert_close(full, dense.flatten(1))
    for (name, p), twin in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, twin.grad, msg=lambda m, name=name: f"{name}: {m}")


@on_subgroup
def second_mask(rank: int, group: Any) -> None:
    """Full causal layers and sliding-window layers on one dispatch, by both kinds of key."""
    cu_seqlens = [0, 40, 64]
    first = api.magi_attn_varlen_key(cu_seqlens, cu_seqlens, *HEADS, 0, group, causal=True)
    window = api.make_varlen_key_for_new_mask_after_dispatch(
        cu_seqlens, cu_seqlens, key_for_dispatch=first, window_size=(6, 0)
    )
    typed = api.infer_attn_mask_from_cu_seqlens(cu_seqlens, cu_seqlens, window_size=(6, 0))[:3]
    flex = api.make_flex_key_for_new_mask_after_dispatch(
        *typed, key_for_dispatch=first, dist_attn_config=config(0)
    )
    assert api.get_most_recent_key(group) == flex
    assert window.plan.layout == flex.plan.layout == first.plan.layout
    assert flex.plan.overlap_degree == 0 and window.plan.overlap_degree == 1
    for key, mask in (
        (first, masks.from_cu_seqlens(cu_seqlens)),
        (window, masks.from_cu_seqlens(cu_seqlens, window_size=(6, 0))),
        (flex, masks.from_cu_seqlens(cu_seqlens, window_size=(6, 0))),
    ):
        q, k, v, dout = random_qkv(mask, *HEADS, torch.float64, 5)
        check(attend(first, key, (q, k, v), dout), mask, q, k, v, dout)


@on_subgroup
def multi_token_prediction(rank: int, group: Any) -> None:
    """Labels of the n-th next token are rolled, never gathered."""
    tokens = torch.arange(100, 137)
    key = api.magi_attn_varlen_key([0, 20, 37], [0, 20, 37], *HEADS, 0, group, causal=True)
    local = api.dispatch(tokens, key, pad_value=-1)
    is_token = local >= 0
    positions = api.get_position_ids(key)
    assert torch.equal(local[is_token], tokens[positions[is_token]]) and positions.max() < 37
    for depth in (1, 2, 3):
        labels = api.roll(local, shift=-depth, dim=0, key=key)
        assert torch.equal(labels[is_token], tokens[(positions[is_token] + depth) % 37])
        assert torch.equal(api.undispatch(labels, key), torch.roll(tokens, -depth))
        assert torch.equal(labels, api.roll_simple(local, -depth, 0, key))
    x = torch.randn(3, 37, dtype=torch.float64)
    dist.broadcast(x, 0, group=group)
    local = api.dispatch(x.T.contiguous(), key).T.requires_grad_()
    rolled = api.roll(local, 5, 1, key)
    assert torch.equal(api.undispatch(rolled.T, key), torch.roll(x, 5, 1).T)
    weight = torch.sin(torch.arange(111.0, dtype=torch.float64)).view(37, 3)
    (grad,) = torch.autograd.grad((api.undispatch(rolled.T, key) * weight).sum(), local)
    assert torch.equal(api.undispatch(grad.T, key), torch.roll(weight, -5, 0))


@on_subgroup
def replicated_sink(rank: int, group: Any) -> None:
    """A rank's sink gradient is its rows' share; the sum over ranks is the gradient."""
    mask = masks.from_cu_seqlens([0, 9, 31])
    q, k, v, dout = random_qkv(mask, *HEADS, torch.float64, 8)
    sink = torch.linspace(-1, 2, 8, dtype=torch.float64).view(2, 4).requires_grad_()
    key = api.magi_attn_varlen_key([0, 9, 31], [0, 9, 31], *HEADS, 0, group, causal=True)
    out, meta = api.calc_attn(*(api.dispatch(x, key) for x in (q, k, v)), key, sink=sink)
    full, lse = api.undispatch(out, key), api.undispatch(meta.lse, key)
    got = torch.autograd.grad(full, (q, k, v, sink), dout)
    dist.all_reduce(got[3], group=group)
    dense, dense_lse = sink_attention(q, k, v, mask, sink, "sh")
    torch.testing.assert_close((full, lse), (dense, dense_lse))
    want = torch.autograd.grad(dense, (q, k, v, sink), dout)
    torch.testing.assert_close(got, want)


@on_subgroup
def max_logits(rank: int, group: Any, degree: int | None) -> None:
    """Of the whole sequence, the same on every rank."""
    for cu_seqlens, mask in (
        ([0, 9, 31], masks.from_cu_seqlens([0, 9, 31])),
        ([0, 0, 3], masks.causal(3)),
    ):
        q, k, v, _ = random_qkv(mask, *HEADS, torch.float64, 8)
        key = api.magi_attn_varlen_key(
            cu_seqlens, cu_seqlens, *HEADS, 0, group, causal=True, dist_attn_config=config(degree)
        )
        local = [api.dispatch(x, key) for x in (q, k, v)]
        _, meta = api.calc_attn(*local, key, softmax_scale=0.7, return_max_logits=True)
        torch.testing.assert_close(meta.max_logits, dense_largest(q, k, mask, 0.7))


def meshes(rank: int, _: int) -> None:
    """A 1-D mesh, and a (node, rank in node) mesh as one group."""
    mask = masks.causal(29)
    for mesh in (
        init_device_mesh("cpu", (4,), mesh_dim_names=("cp",)),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra")),
    ):
        keys = [api.magi_attn_varlen_key([0, 29], [0, 29], *HEADS, 0, mesh, causal=True)
                for _ in range(2)]  # fmt: skip
        assert keys[0] == keys[1] and hash(keys[0]) == hash(keys[1])
        assert api.get_most_recent_key(mesh) == keys[0]
        assert keys[0].plan.ranks_per_node == (2 if mesh.ndim == 2 else 0)
        q, k, v, dout = random_qkv(mask, *HEADS, torch.float64, 6)
        check(attend(keys[0], keys[0], (q, k, v), dout), mask, q, k, v, dout)
    one = DeviceMesh.from_group(subgroup(2), "cpu") if rank < 2 else subgroup(2)
    if rank < 2:
        api.magi_attn_varlen_key([0, 29], [0, 29], *HEADS, 0, one)


@on_subgroup
def old_dispatch_calls(rank: int, group: Any) -> None:
    x = torch.arange(24.0).view(12, 2)
    ranges = api.AttnRanges.from_ranges([[0, 12]])
    local, key = api.magi_attn_varlen_dispatch(
        x, torch.tensor([0, 12]), torch.tensor([0, 12]), *HEADS, 0, group, causal=True
    )
    twin, flex = api.magi_attn_flex_dispatch(
        x, ranges, ranges, ["causal"], 12, 12, *HEADS, 0, group, config(1)
    )
    assert torch.equal(local, twin) and key.plan == flex.plan
    assert torch.equal(api.undispatch(local, key), x)
