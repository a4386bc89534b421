"""One rank of a pretrain script in which the second rank fails once, and which trains again.

    python restart_job.py whole|nvrx|loop SCRIPT flags

whole: no rank fails; nvrx: by nvidia_resiliency_ext, with stand-ins for CUDA where there is none;
loop: by a loop in its place.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import socket
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_magi import run
from megatron_magi.core.comm.process_group import is_alive
from megatron_magi.core.runtime.agreement import comparison
from megatron_magi.launcher.cpu import install_cpu_training, skip_compilation_of_wheels

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    skip_compilation_of_wheels()
    install_cpu_training()

from megatron.core.pipeline_parallel import schedules  # noqa: E402
from megatron.training import get_args, inprocess_restart, training  # noqa: E402
from tiny_flags import use_few_documents  # noqa: E402

use_few_documents()

FAULTY_RANK, FAULTY_ITERATION = 1, 3
connections: set[tuple[int, str]] = set()
"""Of the job's own groups: (file descriptor, what it is)."""


def observe_groups() -> None:
    """Note which connections the job's groups open; groups of ours are not made by this function,
    as they are not known to NCCL's abort either."""
    original = c10d._new_process_group_helper

    @functools.wraps(original)
    def helper(*args: Any, **kwargs: Any) -> Any:
        before = open_sockets()
        made = original(*args, **kwargs)
        connections.update(open_sockets() - before)
        return made

    c10d._new_process_group_helper = helper


def open_sockets() -> set[tuple[int, str]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found.add((int(name), target))
    return found


def abort_groups() -> None:
    """What an abort does to NCCL's exchanges: those under way end with an error, on every rank."""
    for number, _ in connections & open_sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            connection.getpeername()  # a listener has none, and goes on
            connection.shutdown(socket.SHUT_RDWR)
    connections.clear()


def prepare_nvrx() -> None:
    """Stand-ins for CUDA, NVML and NCCL in nvidia_resiliency_ext."""
    from nvidia_resiliency_ext.inprocess import abort, finalize, health_check

    device = SimpleNamespace(is_available=bool_of(True), is_initialized=bool_of(True))
    device.set_device = bool_of(True)
    finalize.torch = SimpleNamespace(cuda=device, device=int)
    for kind in ("GPU", "NVL", "Nic"):
        getattr(health_check, f"Chained{kind}HealthCheck").__call__ = lambda self, state: state
    if not hasattr(c10d, "ProcessGroupNCCL"):
        c10d.ProcessGroupNCCL = type("ProcessGroupNCCL", (), {})
    original = abort.AbortTorchDistributed.__call__

    def abort_first(self: Any, state: Any) -> Any:
        abort_groups()
        return original(self, state)

    abort.AbortTorchDistributed.__call__ = abort_first


def bool_of(answer: bool) -> Any:
    return lambda *args: answer


def in_a_loop(train: Any, args: Any) -> Any:
    """In place of Megatron's `inprocess_restart`: the same steps, without nvidia_resiliency_ext."""

    failures = []  # with the frames that raised, which nvidia_resiliency_ext keeps as well

    def twice(*args: Any, store: Any, **kwargs: Any) -> Any:
        try:
            return train(*args, store=dist.PrefixStore("0", store), **kwargs)
        except Exception as error:
            failures.append(error)
            print(f"restart after {type(error).__name__}", flush=True)
        abort_groups()
        dist.destroy_process_group()
        inprocess_restart.destroy_state()
        gc.collect()
        return train(*args, store=dist.PrefixStore("1", store), **kwargs)

    return twice


def fail_once() -> None:
    """Raise in one rank's forward, once; the other rank goes on into its exchanges."""
    original, left = schedules.forward_step, [FAULTY_ITERATION]

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        if os.environ["RANK"] == str(FAULTY_RANK) and get_args().curr_iteration in left:
            left.clear()
            raise ArithmeticError("a fault that the test makes")
        return original(*args, **kwargs)

    schedules.forward_step = forward_step


def print_steps(script: str, **kwargs: Any) -> Any:
    """Run the script; each step prints its loss and gradient norm unrounded, and how many groups
    that were destroyed are still compared in."""
    original = training.train_step  # with our hook in it

    def train_step(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        stale = sum(not is_alive(group) for group in list(comparison._states))
        loss, norm = float(result[0]["lm loss"]), float(result[5])
        print(f"step {get_args().curr_iteration}: {loss!r} {norm!r} {stale}", flush=True)
        return result

    training.train_step = train_step
    return run_path(script, **kwargs)


run_path = run.runpy.run_path
if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] != "whole":
        fail_once()
    if sys.argv[1] != "whole" and not HAS_CUDA:
        observe_groups()
    if sys.argv[1] == "nvrx" and not HAS_CUDA:
        prepare_nvrx()
    elif sys.argv[1] == "loop":
        inprocess_restart.inprocess_restart = in_a_loop
    run.runpy.run_path = print_steps
    run.main(sys.argv[2:])
