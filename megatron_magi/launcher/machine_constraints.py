"""Collects the settings of a Megatron job that this machine does not support."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_magi.adapter import MEGATRON_VERSION
from megatron_magi.config import MagiConfig
from megatron_magi.core.kernel.head_dims import HeadDims
from megatron_magi.core.kernel.select import choose_backend_name, select_backend
from megatron_magi.launcher.job_sizes import (
    dtype_of,
    heads_of,
    knows_heads,
    refused_heads,
    splits_sequence,
    wrong_sizes,
)
from megatron_magi.launcher.norms import check_local_norm
from megatron_magi.launcher.state_refusals import absent_packages

Rule = Callable[[Any, MagiConfig], Iterator[str]]
"""A rule: (Megatron's arguments, config) -> one line for each refused setting."""
HYBRID_SPECS = ("hybrid_layer_specs", "mamba_layer_specs")
"""Megatron's modules of hybrid specs, which are made of TransformerEngine's layers."""


def machine_refusals(args: Any, magi: MagiConfig) -> list[str]:
    """One line for every setting that this machine cannot follow."""
    if wrong_sizes(args):
        return []  # which are refused on every machine
    return [line for rule in MACHINE_RULES for line in rule(args, magi)]


def _absent_transformer_engine(args: Any, magi: MagiConfig) -> Iterator[str]:
    if importlib.util.find_spec("transformer_engine") is not None:
        return
    module = (getattr(args, "spec", None) or [""])[0]
    if module.endswith(HYBRID_SPECS):
        yield (
            f"--spec {module} requires TransformerEngine, got none; install it or pass --spec "
            f"megatron_magi.adapter.hybrid_spec hybrid_local_spec"
        )
    elif args.transformer_impl == "transformer_engine":
        yield (
            "--transformer-impl transformer_engine requires TransformerEngine, got none; install "
            "it or pass --transformer-impl local"
        )


def _layers_of_mtp(args: Any, magi: MagiConfig) -> Iterator[str]:
    """In 0.20 `isinstance` of a layer and TransformerEngine's class fails where that is absent."""
    is_absent = importlib.util.find_spec("transformer_engine") is None
    if MEGATRON_VERSION[:2] == (0, 20) and is_absent and getattr(args, "mtp_num_layers", None):
        yield (
            f"--mtp-num-layers requires TransformerEngine with Megatron {MEGATRON_VERSION}, which "
            f"builds no such layers without it; install it or leave the flag out"
        )


def _local_norms(args: Any, magi: MagiConfig) -> Iterator[str]:
    if args.transformer_impl != "local":
        return
    try:
        check_local_norm(getattr(args, "normalization", "RMSNorm"), splits_sequence(args))
    except NotImplementedError as error:
        yield str(error)


def kernel_here(args: Any, magi: MagiConfig) -> str:
    """The kernel that the job's attention runs on this machine.

    Raises:
        NotImplementedError, ImportError, RuntimeError: the one that was asked for does not run.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    heads = heads_of(args)
    widths = HeadDims(heads.head_dim, heads.value_dim)
    if magi.kernel_backend == "auto":
        return choose_backend_name(device, dtype_of(args), widths)
    return select_backend(magi.kernel_backend, device, dtype_of(args), widths).name


def _kernel(args: Any, magi: MagiConfig) -> Iterator[str]:
    """The kernel that was asked for must run on this machine."""
    is_chosen_later = magi.kernel_backend == "auto" or not knows_heads(args)
    if is_chosen_later or refused_heads(args) is not None:
        return
    try:
        kernel_here(args, magi)
    except (NotImplementedError, ImportError, RuntimeError) as error:
        yield f"{error} (--magi-kernel {magi.kernel_backend})"


def _transport_here(args: Any, magi: MagiConfig) -> Iterator[str]:
    if magi.transport not in ("auto", "all_to_all") and not torch.cuda.is_available():
        yield (
            f"--magi-transport {magi.transport} requires GPUs of one host, got a machine without "
            f"CUDA; set auto or all_to_all"
        )


def _checkpoint_worker(args: Any, magi: MagiConfig) -> Iterator[str]:
    """Megatron's worker chooses a GPU when it starts; without one it dies, and the job waits."""
    given = getattr(args, "async_save", False) and getattr(
        args, "use_persistent_ckpt_worker", False
    )
    if given and not torch.cuda.is_available():
        yield (
            "--use-persistent-ckpt-worker requires a GPU, got a machine without CUDA, where the "
            "first save waits for ever for a worker that has died; leave the flag out"
        )


MACHINE_RULES: tuple[Rule, ...] = (
    _absent_transformer_engine,
    absent_packages,
    _layers_of_mtp,
    _local_norms,
    _kernel,
    _transport_here,
    _checkpoint_worker,
)
"""Settings that this machine cannot follow; another one may."""
