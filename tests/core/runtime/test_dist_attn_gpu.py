"""The CUDA kernel and NCCL together, one process per GPU."""

import os

import pytest
import torch

from tests.core.runtime import gpu_jobs as jobs
from tests.core.runtime import node_jobs
from tests.process_pool import ProcessPool, pool

NUM_RANKS = int(os.environ.get("MAGI_TEST_GPU_RANKS", torch.cuda.device_count()))
"""More ranks than GPUs share one, for results at sizes that no host at hand has."""
pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(NUM_RANKS < 2, reason="needs two GPUs or more"),
]


@pytest.mark.parametrize("degree", [0, 1, 3, "local_first", "at_once"])
@pytest.mark.parametrize("name", jobs.GPU_MASKS)
@pytest.mark.parametrize(
    "widths", [(64, 64), (128, 128), (192, 128), (256, 256), (96, 80)], ids=str
)
@pytest.mark.parametrize("transport", ["all_to_all", "symm_mem"])
def test_named_masks(name: str, degree: int | str, widths: tuple[int, int], transport: str) -> None:
    how = {"transport": transport}
    pool(NUM_RANKS, "nccl").run(jobs.on_gpus, name, degree, widths, torch.bfloat16, how)


@pytest.mark.parametrize("degree", [0, 1, 3, "local_first", "at_once"])
@pytest.mark.parametrize("name", ["causal", "packed", "sees nothing"])
def test_gpus_that_stand_for_nodes(name: str, degree: int | str) -> None:
    pool(NUM_RANKS, "nccl").run(node_jobs.on_gpus_as_nodes, name, degree, (128, 128))


@pytest.mark.parametrize("connections", [None, "1"])
def test_reduces_with_a_communicator_of_their_own(
    connections: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron sets one connection: kernels then start in the order in which they were begun."""
    if connections is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    workers = ProcessPool(NUM_RANKS, "nccl")
    try:
        for name in ("causal", "packed", "window"):
            for degree in (2, 4, 6):
                workers.run(jobs.one_and_two_communicators, name, degree)
    finally:
        workers.stop()


@pytest.mark.parametrize("degree", [1, 6, "local_first"])
@pytest.mark.parametrize("name", ["causal", "packed"])
def test_replays_of_a_graph(name: str, degree: int | str) -> None:
    pool(NUM_RANKS, "nccl").run(jobs.replays, name, degree)
