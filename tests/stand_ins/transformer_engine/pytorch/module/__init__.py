"""Linear layers and norms."""

from transformer_engine.pytorch.module import base, linear, norm

__all__ = ["base", "linear", "norm"]
