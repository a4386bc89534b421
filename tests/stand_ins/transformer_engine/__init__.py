"""A stand-in for TransformerEngine in plain PyTorch, for tests on machines without CUDA.

It has the names that Megatron's `extensions/transformer_engine.py` needs to build and train a
model in fp32 or bf16: linear layers and norms with tensor and sequence parallelism, grouped linear
layers and a dense causal attention. Tests put its folder first on the path of a worker process.
Nothing here says anything about the real package's kernels.
"""

from transformer_engine import common, pytorch

__version__ = "2.14.0"
__all__ = ["common", "pytorch"]
