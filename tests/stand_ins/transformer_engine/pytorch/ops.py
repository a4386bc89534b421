"""Fusible operations: names for annotations and checks, which nothing builds here."""

from __future__ import annotations

import torch


class FusibleOperation(torch.nn.Module):
    """Any operation."""


class Sequential(FusibleOperation):
    """Operations behind one another."""


class AllReduce(FusibleOperation):
    """Sum over ranks."""


class BasicLinear(FusibleOperation):
    """Product with a weight."""


class Bias(FusibleOperation):
    """Sum with a bias."""


class GroupedLinear(FusibleOperation):
    """Products with one weight an expert."""


class LayerNorm(FusibleOperation):
    """Layer norm."""


class MakeExtraOutput(FusibleOperation):
    """The input once more as an output."""


class ReduceScatter(FusibleOperation):
    """Sum over ranks, each keeping a share."""


class RMSNorm(FusibleOperation):
    """RMS norm."""


class GELU(FusibleOperation):
    """Activation."""


class GEGLU(FusibleOperation):
    """Activation."""


class ReLU(FusibleOperation):
    """Activation."""


class ReGLU(FusibleOperation):
    """Activation."""


class ScaledSwiGLU(FusibleOperation):
    """Activation."""


class SiLU(FusibleOperation):
    """Activation."""


class SwiGLU(FusibleOperation):
    """Activation."""
