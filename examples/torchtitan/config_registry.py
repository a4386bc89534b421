"""Configurations that torchtitan finds by name, started in the root of this repository.

    torchrun --nproc-per-node 8 -m torchtitan.train --module examples.torchtitan \
        --config llama3_debugmodel_magi --parallelism.context_parallel_degree 8
"""

from torchtitan.models.llama3 import config_registry as llama3

from examples.torchtitan.magi import MagiTrainer, with_magi


def llama3_debugmodel_magi() -> MagiTrainer.Config:
    """torchtitan's small Llama with varlen attention, on ours."""
    return with_magi(llama3.llama3_debugmodel_varlen_attn())
