"""Jobs on converted weights for tests/adapter/layout_worker.py, beside training_jobs.py."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from training_jobs import _built, _config, train

from megatron_magi.cli import main
from megatron_magi.training.checkpoint.checkpoint import resume

__all__ = ["command", "logits", "train", "weight_differences"]


def command(lines: list[list[str]]) -> list[list[Any]]:
    """(exit code, output, errors) of each `megatron-magi weights ...`, in a process of its own."""
    torch.distributed.destroy_process_group()
    answers = []
    for line in lines:
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = main(["weights", *line])
        answers.append([code, out.getvalue(), errors.getvalue()])
    return answers


def logits(recipe: dict[str, Any], out: str) -> None:
    """Save tokens, document borders and logits of the first microbatch to the file `out`."""
    run = _built(recipe)
    resume(run.state, run.config)
    microbatch = next(run.streams[0])
    group = parallel_state.get_context_parallel_group()
    inputs = microbatch.local(True, torch.device("cpu"), group).model_inputs()
    with torch.no_grad():
        found = run.state.chunks[0](**{**inputs, "labels": None})
    sample = microbatch.sample
    torch.save((torch.from_numpy(sample.tokens), sample.cu_seqlens.tolist(), found.squeeze()), out)


def weight_differences(recipe: dict[str, Any], before: str, after: str) -> list[Any]:
    """Weights of a run's checkpoint that are not the bits of another, padding aside.

    Returns:
        Number of weights compared, names of different ones, largest padded value of `after`.
    """
    used = _config(recipe).model.vocab_size
    old, new = (_weights(path) for path in (before, after))
    padded = ("embedding.word_embeddings.weight", "output_layer.weight")
    different = [f"only in one: {n}" for n in old.keys() ^ new.keys()]
    padding = 0.0
    for name in old.keys() & new.keys():
        a, b = old[name], new[name]
        if name in padded:
            padding = max(padding, float(b[used:].abs().max()))
            a, b = a[:used], b[:used]
        if a.dtype != b.dtype or not torch.equal(a, b):
            different.append(name)
    return [len(old), different, padding]


def _weights(path: str) -> dict[str, torch.Tensor]:
    loaded = dist_checkpointing.load_plain_tensors(path)
    return {
        name: tensor
        for name, tensor in loaded.items()
        if isinstance(tensor, torch.Tensor) and not name.startswith("optimizer")
    }
