"""`--inprocess-restart`: Megatron trains again in the same processes after a rank has failed.

nvidia_resiliency_ext aborts and destroys the job's process groups, has Megatron destroy its state,
and calls `pretrain` again. magi's own groups are unknown to it, and end here. Two places of
Megatron without which no second `pretrain` starts, with or without the flag, are fixed too.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron_magi.core.runtime.agreement.comparison import forget_groups, leave_process_running
from megatron_magi.launcher.session import LauncherState, hook


@hook
def wrap_inprocess_restart(launch: LauncherState, original: Any, train: Any, args: Any) -> Any:
    """For `inprocess_restart`, which makes a `pretrain` that can be called again."""
    leave_process_running()
    return original(restartable(launch, train), args)


@hook
def wrap_destroy_global_state(
    launch: LauncherState, original: Any, *args: Any, **kwargs: Any
) -> Any:
    """For `destroy_global_state`, which every rank calls after its groups were destroyed."""
    launch.forget_groups()
    forget_groups()
    return original(*args, **kwargs)


def restartable(launch: LauncherState, train: Callable[..., Any]) -> Callable[..., Any]:
    """`pretrain` that finds its arguments, and whose signature asks for the number of the restart.

    nvidia_resiliency_ext passes that number to a parameter that is annotated with its class, and
    Megatron annotates it with Any. Every run then has the same store, in which ranks would find the
    addresses that the run before it has left.
    """

    @functools.wraps(train)
    def pretrain(*args: Any, **kwargs: Any) -> Any:
        set_arguments_again(launch)
        return train(*args, **kwargs)

    pretrain.__signature__ = _asking_for_the_restart(inspect.signature(train))  # type: ignore[attr-defined]
    return pretrain


def set_arguments_again(launch: LauncherState) -> None:
    """Megatron's global variables, from the arguments of the first run, if a restart took them."""
    if launch.first_args is None:
        return
    from megatron.training import arguments, global_vars

    if global_vars._GLOBAL_ARGS is not None:  # the first run
        return
    launch.args = copy.deepcopy(launch.first_args)
    # Ranks may change places with spare ones; Megatron's parser reads the new one.
    launch.args.rank = arguments.parse_args(ignore_unknown_args=True).rank
    global_vars.set_global_variables(launch.args)


def _asking_for_the_restart(signature: inspect.Signature) -> inspect.Signature:
    try:
        from nvidia_resiliency_ext.inprocess import CallWrapper
    except ImportError:  # Megatron warns, and trains without restarts
        return signature
    name = "inprocess_call_wrapper"
    parameters = dict(signature.parameters)
    parameters[name] = parameters[name].replace(annotation=CallWrapper)
    return signature.replace(parameters=list(parameters.values()))
