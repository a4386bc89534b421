"""Settings under which layers with state do not work, from a model's config or from arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron_magi.adapter.state_layers import has_packed_delta_net

MAMBA, DELTA_NET = "M", "G"
"""Megatron's signs of these layers in a hybrid model's pattern."""


def wrong_state_settings(settings: Any, signs: str) -> list[str]:
    """One line for every setting that layers with state do not work with.

    Args:
        settings: a TransformerConfig, or Megatron's arguments.
        signs: the hybrid pattern, or the signs that occur in it.
    """
    rules = [rule for sign, rule in RULES if sign in signs]
    return [line for rule in rules for line in rule(settings)]


def _mamba(settings: Any) -> Iterator[str]:
    if not getattr(settings, "use_mamba_mem_eff_path", True):
        yield (
            "Mamba layers require use_mamba_mem_eff_path, got False: Megatron's other path takes "
            "no documents; leave --disable-mamba-mem-eff-path out"
        )
    head_dim = getattr(settings, "mamba_head_dim", None) or 64
    hidden_size = getattr(settings, "hidden_size", None) or 0  # None: a checkpoint brings it along
    heads = getattr(settings, "mamba_num_heads", None) or 2 * hidden_size // head_dim
    yield from _shared_out(settings, "mamba_num_heads", heads)
    tp_size, cp_size = settings.tensor_model_parallel_size, settings.context_parallel_size
    groups = getattr(settings, "mamba_num_groups", None) or 8
    on_rank = groups // tp_size
    if groups % tp_size or (on_rank % cp_size and cp_size % on_rank):
        yield (
            f"mamba_num_groups must be a multiple of the tensor-parallel size, and its quotient a "
            f"multiple or a divisor of the context-parallel size, got {groups} groups, "
            f"tensor_model_parallel_size={tp_size} and context_parallel_size={cp_size}; change one "
            f"of them"
        )


def _delta_net(settings: Any) -> Iterator[str]:
    if not has_packed_delta_net():
        yield (
            "layers of gated delta net (G) require Megatron 0.19 or newer, got an older one, which "
            "exchanges every document by itself; use a newer one, or leave the layers out"
        )
    if getattr(settings, "deterministic_mode", False):
        yield (
            "layers of gated delta net (G) require deterministic_mode=False, got True: Megatron's "
            "deterministic rule takes no documents; leave --deterministic-mode out"
        )
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        heads = getattr(settings, name, None)
        if heads is not None:
            yield from _shared_out(settings, name, heads)


def _shared_out(settings: Any, name: str, heads: int) -> Iterator[str]:
    """Every rank of the tensor- and the context-parallel group computes whole heads."""
    tp_size, cp_size = settings.tensor_model_parallel_size, settings.context_parallel_size
    if heads % (tp_size * cp_size):
        yield (
            f"{name} must be a multiple of tensor_model_parallel_size x context_parallel_size = "
            f"{tp_size * cp_size}, got {heads}: layers with state are exchanged to a share of "
            f"heads; change the heads or one of the sizes"
        )


RULES: tuple[tuple[str, Callable[[Any], Iterator[str]]], ...] = (
    (MAMBA, _mamba),
    (DELTA_NET, _delta_net),
)
"""Sign of a layer, and what it requires."""
