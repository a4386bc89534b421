"""Processes and groups: joins a launched world, or starts one on this machine."""

from __future__ import annotations

import contextlib
import datetime
import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from megatron_magi.training.process.stop import SIGNALS
from megatron_magi.training.recipe.recipe_error import RecipeError
from megatron_magi.training.recipe.run_config import RunConfig

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

LOOPBACK = "127.0.0.1"
SECONDS_TO_END = 120
"""The time for a rank whose parent has died: it ends its step and saves a checkpoint."""


@dataclass(frozen=True)
class Place:
    """The place of a process in its world."""

    rank: int
    world_size: int
    local_rank: int
    store_port: int | None = None
    """Port of this machine where the ranks find each other. None: by torchrun's variables."""
    num_threads: int | None = None
    """CPU threads of this process. None: torch's choice."""


def launched_place() -> Place | None:
    """This process's place by torchrun's variables, as srun may set them too; None when alone."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return Place(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
    )


@contextmanager
def process_groups(config: RunConfig, place: Place) -> Iterator[None]:
    """torch.distributed (nccl with CUDA, else gloo) and Megatron's groups, torn down at the end."""
    quiet_megatron()
    import torch

    from megatron_magi.adapter.cpu import install_cpu_runtime

    on_cpu = install_cpu_runtime()
    if not on_cpu:
        torch.cuda.set_device(place.local_rank)
    elif place.num_threads is not None:
        torch.set_num_threads(place.num_threads)
    torch.distributed.init_process_group(
        "gloo" if on_cpu else "nccl",
        store=_joined_store(place),
        rank=place.rank,
        world_size=place.world_size,
        timeout=datetime.timedelta(minutes=10),
    )
    try:
        _initialize_megatron(config)
        yield
    except BaseException:
        if on_cpu:
            _destroy()
        # Destroying NCCL's groups waits for all ranks, and the others may wait for this one. The
        # end of the process is enough.
        raise
    _destroy()


@contextmanager
def one_process() -> Iterator[None]:
    """Groups of this process alone, over gloo also where there are GPUs: to convert checkpoints."""
    quiet_megatron()
    import torch
    from megatron.core import parallel_state
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    from megatron_magi.adapter.cpu import install_cpu_runtime

    install_cpu_runtime()
    store = HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        yield
    finally:
        _destroy()


def check_devices(num_processes: int) -> None:
    """Raise RecipeError where this machine has GPUs, but fewer than one for each process."""
    import torch

    num_gpus = torch.cuda.device_count()
    if 0 < num_gpus < num_processes:
        raise RecipeError(
            f"each process needs a GPU of its own, got {num_gpus} GPUs for {num_processes} "
            f"processes; lower parallel.* or use torchrun on several machines"
        )


def run_local(work: Callable[[Place], None], num_processes: int) -> int:
    """Run `work` in `num_processes` new processes of this machine; the exit code of the run.

    The first failure ends the others (they would wait for it in a collective). SIGTERM and SIGINT
    reach all of them as SIGTERM; a second SIGINT ends them at once. If this process is killed, they
    get SIGTERM too.
    """
    context = multiprocessing.get_context("spawn")
    threads = max(1, num_cpus() // num_processes)
    # The ranks meet over a port: a file could not be written where the disk is full.
    store = _new_store()
    places = [Place(r, num_processes, r, store.port, threads) for r in range(num_processes)]
    # Not daemons: writing a checkpoint takes processes of their own in megatron-core 0.16.
    workers = [context.Process(target=_serve, args=(work, place)) for place in places]
    for worker in workers:
        worker.start()
    try:
        with _signals_to(workers):
            return _wait(workers)
    finally:
        for worker in workers:
            worker.kill()  # it may ignore SIGTERM
            worker.join(10)


def quiet_megatron() -> None:
    """Silence warnings about packages that are not needed here and about deprecated names."""
    for message in (
        "(Transformer Engine and )?Apex (is|are) not installed",
        "full scope is deprecated",
        "absl.logging is not installed",
        "MimoModelConfig is experimental",
        # Megatron uses deprecated names of torch's checkpoints in 0.16; 0.19 reads in one process.
        "Please use DTensor instead",
        "`load_state_dict` is deprecated",
    ):
        warnings.filterwarnings("ignore", message=message)
    warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    # It raises what it logs, and that is reported.
    logging.getLogger("megatron.core.dist_checkpointing").setLevel(logging.CRITICAL)


def _new_store() -> TCPStore:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)


def _joined_store(place: Place) -> TCPStore | None:
    """The store of `run_local`; None: the ranks were launched otherwise and have another."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if place.store_port is None:
        return None
    return TCPStore(LOOPBACK, place.store_port, is_master=False)


def _serve(work: Callable[[Place], None], place: Place) -> None:
    """One process of `run_local`."""
    threading.Thread(target=_end_after_parent, daemon=True).start()
    work(place)


def _end_after_parent() -> None:
    """Ask this process to end when the one that started it has died, and then end it.

    Without a parent nothing reports what a rank does, and a second start of the run would meet it.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "started by run_local"
    multiprocessing.connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS_TO_END)
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def _signals_to(workers: Sequence[multiprocessing.process.BaseProcess]) -> Iterator[None]:
    def forward(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        for worker in workers:
            if worker.pid is not None and worker.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGTERM)

    previous = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def num_cpus() -> int:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _wait(workers: Sequence[multiprocessing.process.BaseProcess]) -> int:
    while alive := [w for w in workers if w.exitcode is None]:
        failed = [w.exitcode for w in workers if w.exitcode]
        if failed:
            time.sleep(1.0)  # others often fail from the same cause: let them report it
            return _exit_code(failed[0])
        multiprocessing.connection.wait([w.sentinel for w in alive], timeout=5)
    sys.stdout.flush()
    return max(_exit_code(w.exitcode or 0) for w in workers)


def _exit_code(code: int) -> int:
    """The exit code as in a shell: 128 + the signal that ended a process."""
    return code if code >= 0 else 128 - code


def _initialize_megatron(config: RunConfig) -> None:
    from megatron.core import parallel_state

    p = config.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=p.tp,
        pipeline_model_parallel_size=p.pp,
        virtual_pipeline_model_parallel_size=p.vpp,
        context_parallel_size=p.cp,
        expert_model_parallel_size=p.ep,
    )
    _seed_generators(config.train.seed + 100 * parallel_state.get_pipeline_model_parallel_rank())


def _seed_generators(seed: int) -> None:
    """Equal on the ranks of one pipeline stage, as Megatron seeds them: a checkpoint holds the
    state of one of them for all."""
    import random

    import numpy as np
    import torch
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def _destroy() -> None:
    import torch
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
