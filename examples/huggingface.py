#!/usr/bin/env python3
"""Continues a model of HuggingFace Transformers on packed documents, with context parallelism.

    torchrun --nproc-per-node 2 examples/huggingface.py --cp 2
    torchrun --nproc-per-node 2 examples/huggingface.py --cp 2 --model FOLDER --save FOLDER
    python examples/huggingface.py                                # one process

Without --model it begins with a small random Llama, so that nothing is downloaded. Ranks beyond
--cp are data parallel. It needs no GPU. Lines for this engine are marked `# magi`.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig

from megatron_magi.huggingface import Packing, dispatch_batch, register  # magi

LENGTH, VOCAB, GLOBAL_BATCH = 251, 128, 4  # any length works, also a prime
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32


def load_model(folder: str | None):
    """A pretrained model, or a small random one, whose attention is ours."""
    register()  # magi
    torch.manual_seed(1)
    if folder:
        return AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="magi", dtype=DTYPE  # magi: the name
        )  # fmt: skip
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,  # of 64
        num_key_value_heads=1,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="magi", dtype=DTYPE)  # magi


def packed_sample(step: int, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(input ids, position ids, labels) [1, LENGTH]: documents that count up from a token."""
    random = torch.Generator().manual_seed(1000 * step + index)
    lengths = [60, 3, 120, 17, 51]
    starts = torch.randint(0, VOCAB, (len(lengths),), generator=random)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ids = (positions + torch.repeat_interleave(starts, torch.tensor(lengths))) % VOCAB
    labels = ids.masked_fill(positions == 0, -100)  # nothing foretells a document's first token
    return ids.to(DEVICE), positions.to(DEVICE), labels.to(DEVICE)


def train_step(model, optimizer, mesh, step: int) -> float:
    """The loss per counted token of the global batch, equal on every rank."""
    mine = range(mesh["dp"].get_local_rank(), GLOBAL_BATCH, mesh["dp"].size())
    samples = [packed_sample(step, index) for index in mine]
    counted = torch.stack([(labels[:, 1:] != -100).sum() for *_, labels in samples]).sum()
    dist.all_reduce(counted, group=mesh["dp"].get_group())
    total = torch.zeros((), device=DEVICE)
    for ids, positions, labels in samples:
        packing = Packing(position_ids=positions)
        inputs = dispatch_batch(ids, labels, model.config, mesh["cp"], packing)  # magi
        inputs["num_items_in_batch"] = counted  # of all samples, instead of this one's
        loss = model(**inputs).loss  # this rank's share of the sum
        loss.backward()
        total += loss.detach()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # the shares of all ranks; FSDP or DDP do it as well
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return float(total)


def mesh_shape(parser: argparse.ArgumentParser, cp: int) -> tuple[int, int]:
    """(data-parallel, context-parallel) ranks, or the same error on every rank."""
    world = dist.get_world_size()
    if cp < 1 or world % cp:
        parser.error(f"--cp must be at least 1 and divide the number of processes, got --cp {cp} "
                     f"and {world} of them; start it with torchrun")  # fmt: skip
    dp = world // cp
    if dp > GLOBAL_BATCH:
        parser.error(f"a step has {GLOBAL_BATCH} samples, one or more for each data-parallel rank "
                     f"(processes / --cp), got {dp} ranks; start fewer processes")  # fmt: skip
    return dp, cp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--model", help="folder or name of a pretrained model")
    parser.add_argument("--save", help="folder for the trained model")
    options = parser.parse_args()
    is_alone = "LOCAL_RANK" not in os.environ
    one = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if is_alone else {}
    if ON_GPU:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if ON_GPU else "gloo", **one)
    shape = mesh_shape(parser, options.cp)
    mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("dp", "cp"))
    model = load_model(options.model).to(DEVICE).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(options.steps):
        loss = train_step(model, optimizer, mesh, step)
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss:.6f}", flush=True)
    if options.save and dist.get_rank() == 0:
        model.save_pretrained(options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
