#!/usr/bin/env python3
"""Llama in plain PyTorch on packed documents: FSDP2 over a mesh of data and context parallelism.

    torchrun --nproc-per-node 2 examples/fsdp2.py --cp 2 --checkpoint /tmp/run --steps 3
    torchrun --nproc-per-node 2 examples/fsdp2.py --cp 1 --checkpoint /tmp/run --steps 6   # goes on
    python examples/fsdp2.py                                      # one process

Ranks beyond --cp are data parallel. A checkpoint may go on at any number of ranks. It needs no
GPU: without one it trains over gloo. Lines for this engine are marked `# magi`.
"""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import megatron_magi as magi

LENGTH, VOCAB, GLOBAL_BATCH = 251, 128, 4  # any length works, also a prime
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 2, 128, 4, 2, 64
IGNORED = -100
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32


@dataclass
class Rows:
    """This rank's rows of a packed stream."""

    tokens: Tensor
    positions: Tensor  # inside of their documents
    labels: Tensor  # the next token, IGNORED where there is none
    counted: int  # labels of the whole stream
    plan: magi.AttnPlan


class Attention(nn.Module):
    def __init__(self, cp_mesh: DeviceMesh) -> None:
        super().__init__()
        self.cp_mesh = cp_mesh
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor, angles: Tensor, plan: magi.AttnPlan) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        out, _ = magi.dist_attn(rotate(q, angles), rotate(k, angles), v, plan, self.cp_mesh)  # magi
        return self.out(out.flatten(1))


class Block(nn.Module):
    def __init__(self, cp_mesh: DeviceMesh) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attention = Attention(cp_mesh)
        self.up = nn.Linear(HIDDEN, 2 * 3 * HIDDEN, bias=False)
        self.down = nn.Linear(3 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor, angles: Tensor, plan: magi.AttnPlan) -> Tensor:
        x = x + self.attention(self.norm1(x), angles, plan)
        gate, up = self.up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, cp_mesh: DeviceMesh) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block(cp_mesh) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, rows: Rows) -> Tensor:
        frequencies = 1e4 ** -torch.linspace(0, 1, HEAD_DIM // 2, device=DEVICE)
        angles = rows.positions[:, None] * frequencies
        x = self.embedding(rows.tokens)
        for block in self.blocks:
            x = block(x, angles, rows.plan)
        return self.head(self.norm(x))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embeddings: angles [T, D / 2] for x [T, heads, D]."""
    cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def dispatched_sample(step: int, index: int, cp_mesh: DeviceMesh) -> Rows:
    """One stream of documents, each counting up from a random token; this rank's rows of it."""
    rng = np.random.default_rng([step, index])
    cuts = np.sort(rng.choice(np.arange(1, LENGTH), size=5, replace=False))
    bounds = np.array([0, *cuts, LENGTH])
    positions = np.arange(LENGTH) - np.repeat(bounds[:-1], np.diff(bounds))
    tokens = (positions + np.repeat(rng.integers(0, VOCAB, 6), np.diff(bounds))) % VOCAB
    labels = np.roll(tokens, -1)  # shifted here, in the order of the stream
    labels[bounds[1:] - 1] = IGNORED  # a document's last token has no next one

    mask = magi.masks.from_cu_seqlens(bounds)  # magi
    heads = magi.HeadShape(HEADS, KV_HEADS, HEAD_DIM, bytes_per_element=DTYPE.itemsize)  # magi
    plan = magi.plan(mask, cp_mesh, heads)  # magi: pure, equal on every rank
    local = [
        magi.dispatch(torch.from_numpy(x).to(DEVICE), plan, cp_mesh, pad_value=pad)  # magi
        for x, pad in ((tokens, 0), (positions, 0), (labels, IGNORED))
    ]
    return Rows(*local, counted=int((labels != IGNORED).sum()), plan=plan)


def build_model(mesh: DeviceMesh) -> nn.Module:
    """Weights are spread over all ranks, and their gradients are averaged over all."""
    torch.manual_seed(1)
    model = Llama(mesh["cp"]).to(DEVICE, DTYPE)
    everyone = mesh._flatten("all") if mesh.size() > 1 else mesh["cp"]
    for block in model.blocks:
        fully_shard(block, mesh=everyone)
    return fully_shard(model, mesh=everyone)


def train_step(model: nn.Module, optimizer, mesh: DeviceMesh, step: int) -> float:
    """The loss per counted token of the global batch, equal on every rank."""
    mine = range(mesh["dp"].get_local_rank(), GLOBAL_BATCH, mesh["dp"].size())
    samples = [dispatched_sample(step, index, mesh["cp"]) for index in mine]
    counted = torch.tensor(float(sum(rows.counted for rows in samples)), device=DEVICE)
    dist.all_reduce(counted, group=mesh["dp"].get_group())
    total = torch.zeros((), device=DEVICE)
    for rows in samples:
        logits = model(rows).float()
        loss = F.cross_entropy(logits, rows.labels, ignore_index=IGNORED, reduction="sum") / counted
        (loss * mesh.size()).backward()  # FSDP averages gradients; ranks hold shares of a sum
        total += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return float(total)


def save(model: nn.Module, optimizer, step: int, folder: Path) -> None:
    weights, state = get_state_dict(model, optimizer)
    everything = {"model": weights, "optimizer": state, "step": step}
    dcp.save(everything, storage_writer=dcp.FileSystemWriter(folder, overwrite=True))


def load(model: nn.Module, optimizer, folder: Path) -> int:
    """Go on from a checkpoint of any number of ranks; the number of steps done."""
    weights, state = get_state_dict(model, optimizer)
    everything = {"model": weights, "optimizer": state, "step": 0}
    dcp.load(everything, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=weights, optim_state_dict=everything["optimizer"]
    )
    return everything["step"]


def mesh_shape(parser: argparse.ArgumentParser, cp: int) -> tuple[int, int]:
    """(data-parallel, context-parallel) ranks, or the same error on every rank."""
    world = dist.get_world_size()
    if cp < 1 or world % cp:
        parser.error(f"--cp must be at least 1 and divide the number of processes, got --cp {cp} "
                     f"and {world} of them; start it with torchrun")  # fmt: skip
    dp = world // cp
    if GLOBAL_BATCH % dp:
        parser.error(f"the data-parallel ranks (processes / --cp) must divide the {GLOBAL_BATCH} "
                     f"samples of a step, because FSDP gathers weights on all ranks for each of "
                     f"them; got {dp}; start another number of processes")  # fmt: skip
    return dp, cp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks")
    parser.add_argument("--steps", type=int, default=5, help="steps of the whole run")
    parser.add_argument("--checkpoint", type=Path, help="folder to go on from and to save to")
    options = parser.parse_args()
    is_alone = "LOCAL_RANK" not in os.environ
    one = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if is_alone else {}
    if ON_GPU:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if ON_GPU else "gloo", **one)
    shape = mesh_shape(parser, options.cp)
    mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("dp", "cp"))
    model = build_model(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    folder = options.checkpoint
    done = load(model, optimizer, folder) if folder and (folder / ".metadata").exists() else 0
    for step in range(done, options.steps):
        loss = train_step(model, optimizer, mesh, step)
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss:.6f}", flush=True)
    if folder:
        save(model, optimizer, max(done, options.steps), folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
