"""The CUDA kernel and NCCL together, one process per GPU."""

import pytest
import torch

from tests.core.runtime import runtime_jobs as jobs
from tests.process_pool import pool

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs or more"),
]


@pytest.mark.parametrize("degree", [0, 1, 3, "local_first", "at_once"])
@pytest.mark.parametrize("name", jobs.GPU_MASKS)
@pytest.mark.parametrize("dim", [64, 128])
def test_named_masks(name: str, degree: int | str, dim: int) -> None:
    pool(NUM_GPUS, "nccl").run(jobs.on_gpus, name, degree, dim, torch.bfloat16)
