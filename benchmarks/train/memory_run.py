"""The part of memory.py that trains: documents, processes, and what a rank allocates."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_magi.training.process.processes import (
    Place,
    process_groups,
    quiet_megatron,
    run_local,
)
from megatron_magi.training.recipe.run_config import RunConfig

Facts = dict[str, Any]


def pack_documents(prefix: Path, num_tokens: int = 1 << 20) -> None:
    """Random bytes as packed documents, lengths exponential with a mean of 2048."""
    quiet_megatron()
    from megatron_magi.text.documents import Document
    from megatron_magi.text.pack import pack
    from megatron_magi.text.tokenizers import ByteTokenizer

    rng = np.random.RandomState(0)
    lengths = 1 + rng.exponential(2048, num_tokens // 2048).astype(np.int64)
    texts = (bytes(97 + rng.randint(0, 8, n).astype(np.uint8)) for n in lengths)
    pack((Document(f"d{i}", text) for i, text in enumerate(texts)), prefix, ByteTokenizer())


def run_case(config: RunConfig, num_ranks: int, limit_s: float) -> list[Facts]:
    """What every rank measured; ranks that failed, or took longer than the limit, are missing."""
    watchdog = threading.Timer(limit_s, os.kill, (os.getpid(), signal.SIGTERM))
    watchdog.daemon = True
    with tempfile.TemporaryDirectory(prefix="bench-memory-") as folder:
        watchdog.start()
        try:
            run_local(partial(measure_rank, config, Path(folder)), num_ranks)
        finally:
            watchdog.cancel()
        return [json.loads(p.read_text()) for p in sorted(Path(folder).glob("*.json"))]


def measure_rank(config: RunConfig, folder: Path, place: Place) -> None:
    """One process: train, and leave the numbers in the folder."""
    with process_groups(config, place):
        facts = {"rank": place.rank, **train_and_measure(config)}
        (folder / f"{place.rank}.json").write_text(json.dumps(facts))


def train_and_measure(config: RunConfig) -> Facts:
    """Bytes on this rank's GPU: what is held, the peak of each phase, the peak of all."""
    from megatron_magi.training.checkpoint.checkpoint import TrainingState
    from megatron_magi.training.data.packed_samples import PackedDataset
    from megatron_magi.training.run import loop, microbatch, model, step

    device = loop.rank_device()
    model_config = model.transformer_config(config)
    chunks = model.build_model(config, model_config)
    built = torch.cuda.memory_allocated()
    state = TrainingState(chunks, *model.build_optimizer(config, chunks))
    dataset = PackedDataset(config.data, config.train.seed)
    streams = microbatch.microbatch_streams(dataset, config, model_config, device)
    schedule = step.StepSchedule(config, model_config, chunks, device)
    peaks = {"build": torch.cuda.max_memory_allocated(), "step": 0, "update": 0}
    state.optimizer.step = partial(_measured_update, state.optimizer.step, peaks)
    seconds = []
    for _ in range(config.train.iterations):
        begin = time.perf_counter()
        sums, grad_norm, _ = loop.train_step(schedule, streams, dataset, state)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        state.iteration += 1
    tokens = config.train.global_batch_size * config.data.seq_length
    return {
        "weights_and_gradients": built,
        "optimizer": torch.cuda.memory_allocated() - built,
        **{f"peak_{name}": number for name, number in peaks.items()},
        "peak": max(peaks.values()),
        "reserved": torch.cuda.max_memory_reserved(),
        "loss": sums.mean_loss,
        "grad_norm": float(grad_norm),
        "tokens_per_second": round(tokens / float(np.median(seconds[1:]))),
    }


def _measured_update(update: Callable[[], Any], peaks: dict[str, int]) -> Any:
    _note_peak(peaks, "step")
    done = update()
    _note_peak(peaks, "update")
    return done


def _note_peak(peaks: dict[str, int], name: str) -> None:
    """Keep the peak since the last call under `name` and begin a new one."""
    peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated())
    torch.cuda.reset_peak_memory_stats()
