"""torch's Adam, where Megatron expects apex's: how it updates, and how it is loaded.

By default torch's Adam updates by a chain of kernels with a copy of all second moments between
them, which takes 4 bytes per parameter during the step. On a GPU it also has one fused kernel,
which Megatron does not ask for.

torch's Adam keeps one step count per parameter; the Adams of apex and TransformerEngine keep one
per group. Megatron (0.16.1 to 0.19.2) saves the count once and, for torch's Adam, makes three
mistakes when it loads. Before the first step there is no state to describe (AssertionError), a
state of three entries is filled from two (KeyError: 'step'), and then all parameters share one
count, which every parameter's update raises. With the other Adams these functions do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def choose_update(optimizer: Any, fused: bool) -> None:
    """Let every torch Adam of a Megatron optimizer update in one kernel, or in a chain of them."""
    for _, adam in _torch_adams(optimizer):
        for group in adam.param_groups:
            group.update(fused=fused or None, foreach=False if fused else None)
        for p, state in adam.state.items():
            if "step" in state:  # the fused kernel keeps its count on the device
                state["step"] = state["step"].to(p.device if fused else "cpu")


def is_fused(optimizer: Any) -> bool:
    """True if torch's Adam in this optimizer updates in one kernel."""
    groups = (group for _, adam in _torch_adams(optimizer) for group in adam.param_groups)
    return any(bool(group.get("fused")) for group in groups)


def prepare_to_load(optimizer: Any) -> None:
    """Prepare a Megatron optimizer; call it before its state is described and loaded."""
    for part, adam in _torch_adams(optimizer):
        for group in adam.param_groups:
            for p in group["params"]:
                adam.state[p] = adam.state[p] or {
                    "step": torch.tensor(0.0, device="cpu"),
                    "exp_avg": torch.zeros_like(p.data),
                    "exp_avg_sq": torch.zeros_like(p.data),
                }
        if isinstance(part, DistributedOptimizer):
            part._set_main_param_and_optimizer_states = partial(_set_state_but_step, part)


def finish_loading(optimizer: Any, fused: bool) -> None:
    """Repair a Megatron optimizer after its `load_state_dict`.

    Args:
        fused: how this run updates; a loaded group has the saved run's choice.
    """
    for _, adam in _torch_adams(optimizer):
        for state in adam.state.values():
            state["step"] = state["step"].clone()
    choose_update(optimizer, fused)


def _torch_adams(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """(Megatron's optimizer, torch's Adam inside it) for every part of a chain."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        adam = getattr(part, "optimizer", None)
        if isinstance(adam, (torch.optim.Adam, torch.optim.AdamW)):
            yield part, adam


def _set_state_but_step(part: Any, model_param: Any, tensors: dict[str, Any]) -> None:
    """Call Megatron's method with the step count of the state, whatever `tensors` has: it has none,
    or, of a checkpoint that keeps the layout of ranks, the one of before the load."""
    group_index, group_order = part.model_param_group_index_map[model_param]
    main_param = part.optimizer.param_groups[group_index]["params"][group_order]
    step = part.optimizer.state[main_param]["step"]
    # Not every loader of Megatron switches gradients off, and parameters of fp32 are leaves.
    with torch.no_grad():
        type(part)._set_main_param_and_optimizer_states(
            part, model_param, {**tensors, "step": step}
        )
