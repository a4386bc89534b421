"""A Llama in plain PyTorch under FSDP2 and context parallelism: magi compared with PyTorch's own.

    torchrun --nproc-per-node 2 -m benchmarks.train.fsdp2 --record FILE.json

The model and its sharding are those of examples/fsdp2.py, larger. The ways to attend:
  ours          the example's: megatron_magi.dist_attn, dispatched by a plan
  sdpa          torch's context_parallel around scaled_dot_product_attention (causal alone)
  flex_document FlexAttention with torch's context-parallel plan, which gathers all keys, and its
                load balancer by document
Steps of all ways come in random order, round after round, on the same samples; the median of the
slowest rank's times is reported. Losses of the first round must agree.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import megatron_magi as magi
from benchmarks.lib.command import command_line, require_torchrun
from benchmarks.lib.options import at_least, list_of, new_file
from benchmarks.lib.packed import Packed, cut_at_random, packed
from benchmarks.lib.record import describe, write_record
from benchmarks.lib.steps import figures, timed
from benchmarks.lib.timing import rounds
from examples import fsdp2 as example
from megatron_magi.cli.errors import run_cli
from megatron_magi.cli.parser import CommandParser

SIZES = {
    "LAYERS": 8, "HIDDEN": 2048, "HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 64, "VOCAB": 32768,
}  # fmt: skip
"""Names of the example's constants."""
SMALL = {"LAYERS": 2, "HIDDEN": 128, "HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 64, "VOCAB": 256}
MEAN_DOCUMENT = 2048
"""Tokens."""
WARM_ROUNDS = 3
DIST_ATTN = magi.dist_attn
MOST_DIFFERENCE = 2e-3
"""Of two ways' losses, relative."""


def rows_of(sample: Packed, parts: list[Tensor], plan: Any) -> example.Rows:
    """This rank's part of a sample, and what its attention is given."""
    return example.Rows(*parts, counted=int((sample.labels != example.IGNORED).sum()), plan=plan)


def drawn_sample(seed: int, length: int, mean_document: int | None) -> Packed:
    """Random tokens in documents of about this length, or in a single one. They begin at multiples
    of twice the ranks, because torch's load balancer by document takes no others."""
    rng = np.random.default_rng(seed)
    bounds = [0, length]
    if mean_document is not None:
        bounds = cut_at_random(rng, length, mean_document, 2 * dist.get_world_size())
    return packed(rng.integers(0, example.VOCAB, length), bounds, example.DEVICE)


class Way:
    """One way to attend; this one is ours."""

    def __init__(self, mesh: DeviceMesh) -> None:
        """``mesh``: of context parallelism."""
        self.mesh = mesh

    def context(self, sample: Packed) -> AbstractContextManager[Any]:
        """What a step runs in."""
        return nullcontext()

    def rows(self, sample: Packed) -> example.Rows:
        """This rank's rows."""
        counts = example.HEADS, example.KV_HEADS, example.HEAD_DIM
        heads = magi.HeadShape(*counts, bytes_per_element=example.DTYPE.itemsize)
        plan = magi.plan(magi.masks.from_cu_seqlens(sample.bounds), self.mesh, heads)
        pads = 0, 0, example.IGNORED
        local = [
            magi.dispatch(x, plan, self.mesh, pad_value=pad)
            for x, pad in zip(sample.parts, pads, strict=True)
        ]
        return rows_of(sample, local, plan)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Any, mesh: DeviceMesh
    ) -> tuple[Tensor, Any]:
        """What the model calls as ``dist_attn``."""
        return DIST_ATTN(q, k, v, plan, mesh)


class Sdpa(Way):
    """torch's ring attention over head-and-tail parts of a causal sequence."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self._parts: list[Tensor] = []

    @contextmanager
    def _sharded(self, sample: Packed) -> Iterator[None]:
        from torch.distributed.tensor.experimental import context_parallel

        self._parts = [x[None].clone() for x in sample.parts]
        with context_parallel(self.mesh, buffers=self._parts, buffer_seq_dims=[1, 1, 1]):
            yield

    def context(self, sample: Packed) -> AbstractContextManager[Any]:
        return self._sharded(sample)

    def rows(self, sample: Packed) -> example.Rows:
        return rows_of(sample, [x[0] for x in self._parts], None)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Any, mesh: DeviceMesh
    ) -> tuple[Tensor, None]:
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        q, k, v = (x.transpose(0, 1)[None].contiguous() for x in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out[0].transpose(0, 1), None


class FlexInner(nn.Module):
    """What torch's plan for context parallelism wraps."""

    def __init__(self) -> None:
        super().__init__()
        from torch.nn.attention.flex_attention import flex_attention

        self.flex: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any) -> Tensor:
        return self.flex(q, k, v, block_mask=block_mask, enable_gqa=True)


class Flex(Way):
    """FlexAttention on all keys, with the load balancer by document."""

    def __init__(self, mesh: DeviceMesh) -> None:
        from torch.distributed.tensor.experimental._attention import _ContextParallel
        from torch.distributed.tensor.parallel import parallelize_module

        super().__init__(mesh)
        kind = _ContextParallel.AttentionType.FLEX
        self.inner = parallelize_module(FlexInner(), mesh, _ContextParallel(2, kind))

    def rows(self, sample: Packed) -> example.Rows:
        from torch.distributed.tensor.experimental import _attention as torch_cp
        from torch.distributed.tensor.experimental._context_parallel._attention import (
            _create_cp_block_mask,
        )

        length, world = len(sample.tokens), self.mesh.size()
        counts = torch.tensor(np.diff(sample.bounds), device=example.DEVICE)
        document = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)

        def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (document[q] == document[k])

        balancer = torch_cp._PerDocumentHeadTailLoadBalancer(
            [counts.tolist()], world, example.DEVICE
        )
        mask = _create_cp_block_mask(visible, 1, 1, length, length, self.mesh, balancer)
        parts = [x[None] for x in sample.parts]
        local = torch_cp._context_parallel_shard(self.mesh, parts, [1, 1, 1], balancer)
        return rows_of(sample, [x[0] for x in local], mask)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Any, mesh: DeviceMesh
    ) -> tuple[Tensor, None]:
        q, k, v = (x.transpose(0, 1)[None].contiguous() for x in (q, k, v))
        return self.inner(q, k, v, block_mask=plan)[0].transpose(0, 1), None


WAYS: dict[str, Callable[[DeviceMesh], Way]] = {
    "ours": Way,
    "sdpa": Sdpa,
    "flex_document": Flex,
}


def step(way: Way, model: nn.Module, optimizer: Any, sample: Packed, world: int) -> float:
    """Train on one sample; this rank's share of the loss."""
    with way.context(sample), mock.patch.object(example.magi, "dist_attn", way.attend):
        rows = way.rows(sample)
        logits = model(rows).float()
        loss = nn.functional.cross_entropy(
            logits, rows.labels, ignore_index=example.IGNORED, reduction="sum"
        )
        (loss / rows.counted * world).backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach()) / rows.counted


def summed(share: float) -> float:
    """The sum of all ranks' shares."""
    total = torch.tensor([share], device=example.DEVICE)
    dist.all_reduce(total)
    return total.item()


def measure(
    mask: str, names: list[str], options: argparse.Namespace, mesh: DeviceMesh
) -> list[dict[str, Any]]:
    """A row for every way that trains on this mask."""
    mean = None if mask == "causal" else MEAN_DOCUMENT
    names = [name for name in names if mask == "causal" or name != "sdpa"]
    torch.manual_seed(1)
    model = example.build_model(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=example.ON_GPU)
    ways = {name: WAYS[name](mesh["cp"]) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, float] = {}
    for turn, name in rounds(names, WARM_ROUNDS + options.rounds):
        sample = drawn_sample(turn % WARM_ROUNDS, options.length, mean)
        one_step = functools.partial(step, ways[name], model, optimizer, sample, mesh.size())
        ms, share = timed(one_step, example.DEVICE)
        losses.setdefault(name, summed(share))
        if dist.get_rank() == 0:
            print(f"{mask}, round {turn} {name}: {ms:.1f} ms", flush=True)
        if turn >= WARM_ROUNDS:
            times[name].append(ms)
    first = losses[names[0]]
    rows = []
    for name in names:
        agrees = abs(losses[name] / first - 1) < MOST_DIFFERENCE
        rows.append({
            "mask": mask, "way": name, "length": options.length,
            **figures(times[name], options.length), "loss": losses[name], "agrees": agrees,
        })  # fmt: skip
    return rows


def main() -> int:
    parser = CommandParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", type=list_of(str), default=list(WAYS))
    parser.add_argument("--masks", type=list_of(str), default=["causal", "documents"])
    parser.add_argument("--length", type=at_least(256), default=32768, help="tokens of a sample")
    parser.add_argument("--rounds", type=at_least(1), default=9)
    parser.add_argument("--record", type=new_file)
    parser.add_argument("--commit")
    options = parser.parse_args()
    require_torchrun()
    for name, value in (SIZES if example.ON_GPU else SMALL).items():
        setattr(example, name, value)
    if example.ON_GPU:
        torch.cuda.set_device(int(torch.distributed.get_node_local_rank(0)))
    dist.init_process_group("nccl" if example.ON_GPU else "gloo")
    mesh = init_device_mesh(example.DEVICE, (1, dist.get_world_size()), mesh_dim_names=("dp", "cp"))
    rows = []
    for mask in options.masks:
        rows += measure(mask, options.ways, options, mesh)
        if dist.get_rank() == 0:
            for row in rows[-len(options.ways) :]:
                print(row, flush=True)
            meta = {**describe(command_line(), options.commit), "sizes": SIZES}
            write_record(options.record, meta, rows)
    dist.destroy_process_group()
    return 0 if all(row["agrees"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
