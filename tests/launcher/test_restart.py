"""`--inprocess-restart`: one of two ranks fails, and both train again in the same processes."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest

import megatron_magi.adapter
from megatron_magi.config import MagiConfig
from megatron_magi.core.comm import process_group, reduce_group
from megatron_magi.core.runtime.agreement import comparison
from megatron_magi.launcher.constraints import refusals
from megatron_magi.launcher.flags import LauncherOptions
from megatron_magi.launcher.restart import (
    restartable,
    set_arguments_again,
    wrap_inprocess_restart,
)
from megatron_magi.launcher.session import LauncherState
from megatron_magi.launcher.settings import change_settings, take_settings
from tests.launcher.few_arguments import arguments
from tests.launcher.layouts import BY_EOD, CP2, JOBS, MAGI, SMALL_SCRIPT, TP2_SP, job, values
from tests.launcher.restarted_steps import (
    JOB,
    SAVED,
    Steps,
    assert_one_restart,
    assert_restarted,
)
from tests.launcher.tiny_flags import TINY
from tests.launcher.two_ranks import Ranks
from tests.megatron_worker import run_jobs_of

LAYOUTS: dict[str, dict[str, Any]] = {"cp2": CP2, "documents tp2": {**MAGI, **TP2_SP, **BY_EOD}}
STEPS = 4
NEEDED = (0, 6)
"""Megatron asks for this nvidia_resiliency_ext or a later one."""
trains = pytest.mark.skipif(
    megatron_magi.adapter.MEGATRON_VERSION[:2] != (0, 19),
    reason="the script is written for megatron.training of the 0.19 wheel",
)


def installed() -> tuple[int, ...]:
    """The version of nvidia_resiliency_ext; () without it."""
    try:
        found = metadata.version("nvidia-resiliency-ext")
    except metadata.PackageNotFoundError:
        return ()
    return tuple(int(x) for x in found.split(".")[:2])


def train(how: str, layout: str, folder: Path) -> list[str]:
    """What two ranks print that save after every second step."""
    flags = {**TINY, **LAYOUTS[layout], "train-iters": STEPS, "save-interval": SAVED}
    flags |= {"save": str(folder), "load": str(folder)}
    flags |= {"inprocess-restart": True, "inprocess-granularity": "rank"}
    return Ranks(flags, (JOB, how, str(SMALL_SCRIPT))).outputs()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Steps]:
    """The steps of a run in which no rank fails, by the name of its layout."""

    @functools.cache
    def run(layout: str) -> Steps:
        one = job(layout, SMALL_SCRIPT, LAYOUTS[layout], {"train-iters": STEPS})
        one["kwargs"]["drawn_weights"] = True
        seen = values(run_jobs_of(JOBS, [one], tmp_path_factory.mktemp("whole"), 200)[layout])
        return list(zip(range(STEPS), seen["loss"], seen["grad_norm"], strict=True))

    return run


@trains
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["cp2", pytest.param("documents tp2", marks=pytest.mark.slow)])
def test_a_run_goes_on_from_its_last_save(
    layout: str, whole: Callable[[str], Steps], tmp_path: Path
) -> None:
    """A loop does what nvidia_resiliency_ext would: it ends groups and state, and trains again."""
    outputs = train("loop", layout, tmp_path)
    assert "restart after ArithmeticError" in outputs[1]
    assert_restarted(outputs, whole(layout))


@trains
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    installed() < NEEDED,
    reason=f"nvidia_resiliency_ext {'.'.join(map(str, NEEDED))} or later is not installed",
)
def test_nvidia_resiliency_ext_restarts_a_run(
    whole: Callable[[str], Steps], tmp_path: Path
) -> None:
    outputs = train("nvrx", "cp2", tmp_path)
    assert_one_restart(outputs)
    assert_restarted(outputs, whole("cp2"))


def test_the_signature_asks_for_the_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia_resiliency_ext looks for parameters that are annotated with its class."""

    class CallWrapper:
        pass

    stand_in: Any = ModuleType("nvidia_resiliency_ext.inprocess")
    stand_in.CallWrapper = CallWrapper
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext", ModuleType("nvidia_resiliency_ext"))
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)

    def pretrain(config: int, store: Any = None, inprocess_call_wrapper: Any = None) -> Any:
        return config, store, inprocess_call_wrapper

    made = restartable(LauncherState(LauncherOptions(MagiConfig())), pretrain)
    parameters = inspect.signature(made).parameters
    assert list(parameters) == ["config", "store", "inprocess_call_wrapper"]
    assert parameters["inprocess_call_wrapper"].annotation is CallWrapper
    assert made(1, store=2, inprocess_call_wrapper=3) == (1, 2, 3)


def test_without_nvidia_resiliency_ext_the_signature_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext.inprocess", None)

    def pretrain(config: int, inprocess_call_wrapper: Any = None) -> Any:
        return config, inprocess_call_wrapper

    made = restartable(LauncherState(LauncherOptions(MagiConfig())), pretrain)
    assert inspect.signature(made) == inspect.signature(pretrain)


def test_rows_move_by_what_a_restart_can_abort() -> None:
    launch = LauncherState(LauncherOptions(MagiConfig()))
    args = arguments(inprocess_restart=True, calculate_per_token_loss=True)
    take_settings(launch, args)
    assert launch.options.config.transport == "all_to_all"
    args.create_attention_mask_in_dataloader = False
    (line,) = change_settings(args)
    assert line.startswith("--magi-transport all_to_all is set: an in-process restart ends")
    other = LauncherState(LauncherOptions(MagiConfig()))
    take_settings(other, arguments())
    assert other.options.config.transport == "auto"


def test_copies_that_cannot_be_aborted_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    magi = MagiConfig(transport="symm_mem")
    (line,) = refusals(arguments(inprocess_restart=True), magi)
    assert line == (
        "--inprocess-restart requires --magi-transport auto or all_to_all, got symm_mem: a restart "
        "ends exchanges over NCCL, and no copies that wait for a lost rank; set auto or all_to_all"
    )
    assert refusals(arguments(inprocess_restart=True), MagiConfig()) == []
    assert refusals(arguments(), magi) == []


def test_groups_of_a_run_that_has_ended_are_dropped() -> None:
    launch = LauncherState(LauncherOptions(MagiConfig()), model_config="config", sequences=(1, 2))
    launch.microbatch.ranks = SimpleNamespace()  # type: ignore[assignment]
    launch._recent[((0, 1), None)] = SimpleNamespace()  # type: ignore[assignment]
    launch.forget_groups()
    assert (launch.model_config, launch.sequences, launch._recent) == (None, None, {})
    assert launch.microbatch.ranks is None


class Group:
    """A group of two ranks, as far as a table needs one."""


def test_tables_of_groups_are_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a fault ranks may have opened unequally many groups of one name."""
    group, watcher = Group(), SimpleNamespace(start=lambda: None)
    opened, counts = WeakKeyDictionary({group: {}}), Counter({"agreement": 3})
    monkeypatch.setattr(comparison, "_watcher", watcher)
    monkeypatch.setattr(comparison, "_states", comparison._states)
    monkeypatch.setattr(process_group, "_num_opened", counts)
    monkeypatch.setattr(reduce_group, "_opened", opened)
    comparison.forget_groups()
    assert (dict(counts), len(opened), len(comparison._states)) == ({}, 0, 0)


def test_the_watcher_leaves_the_process_to_the_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """From where Megatron wraps `pretrain` on."""
    monkeypatch.setattr(comparison._watcher, "ends_process", True)
    wrap = wrap_inprocess_restart(
        lambda train, args: train, LauncherState(LauncherOptions(MagiConfig()))
    )
    assert wrap(lambda inprocess_call_wrapper=None: "trained", "args")() == "trained"
    monkeypatch.setattr("os._exit", lambda status: pytest.fail("the process was ended"))
    comparison._watcher._report("ranks differ")


@trains
def test_every_restart_begins_with_the_first_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron changes its arguments while it trains; the rank is that of the restart."""
    from megatron.training import arguments as parser
    from megatron.training import global_vars

    launch = LauncherState(LauncherOptions(MagiConfig()))
    launch.first_args = SimpleNamespace(rank=0, changed=[1])
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", None)
    monkeypatch.setattr(parser, "parse_args", lambda **_: SimpleNamespace(rank=3))
    monkeypatch.setattr(global_vars, "set_global_variables", lambda args: args.changed.append(2))
    for _ in range(2):
        set_arguments_again(launch)
        assert (launch.args.rank, launch.args.changed) == (3, [1, 2])
