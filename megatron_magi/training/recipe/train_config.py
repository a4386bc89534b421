"""The length of a run, its batches and its updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam with decoupled weight decay, on Megatron's learning-rate schedule."""

    lr: float = 3e-4
    """Highest learning rate, at the end of the warm-up."""
    min_lr: float = 3e-5
    """Learning rate at the end of the decay, and after it."""
    warmup_iters: int = 0
    """Iterations in which the learning rate rises from 0 to lr. 0: none."""
    decay_iters: int | None = None
    """Iterations until min_lr. None: train.iterations."""
    decay_style: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the decay from lr to min_lr; "constant" stays at lr."""
    beta1: float = 0.9
    """Decay of the running mean of gradients."""
    beta2: float = 0.95
    """Decay of the running mean of squared gradients."""
    eps: float = 1e-8
    """The epsilon that is added to the root of that mean before the division by it."""
    weight_decay: float = 0.1
    """An update shrinks weights by this number times the learning rate. 0: none."""
    clip_grad: float = 1.0
    """Limit of the global gradient norm. 0: no limit."""


@dataclass(frozen=True)
class TrainConfig:
    """Length, batch and precision."""

    iterations: int = 100
    """Steps of the run, each one global batch and one update."""
    global_batch_size: int = 8
    """Samples per step over all data-parallel replicas; a microbatch is one packed sample."""
    seed: int = 1234
    """Seed of the weights (drawn by parameter name) and of the order of samples."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of weights and activations; with bf16, main weights and reduced gradients are fp32."""
    recompute: Literal["none", "attention", "full"] = "none"
    """What the backward pass computes again: nothing, core attention, or whole layers."""
    dump_gradients: tuple[int, ...] = ()
    """Iterations whose gradients are written, whole and in fp32, to log.dir/NAME/gradients. Those
    beyond train.iterations are not reached and not written."""


@dataclass(frozen=True)
class ValidationConfig:
    """Loss on documents that training never sees."""

    fraction: float = 0.0
    """Share of the documents held out, by document number alone: the same for every seed."""
    interval: int | None = None
    """Iterations between validations; the last iteration validates too. None: never."""
    batches: int = 4
    """Batches of train.global_batch_size samples, the same ones every time."""
