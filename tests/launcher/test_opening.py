"""What ranks share is opened once Megatron has built the model."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import pytest

from megatron_magi.config import MagiConfig
from megatron_magi.core.comm import reduce_group
from megatron_magi.launcher import opening
from megatron_magi.launcher.flags import LauncherOptions
from megatron_magi.launcher.opening import open_groups
from megatron_magi.launcher.session import LauncherState
from tests.launcher.few_arguments import arguments
from tests.launcher.test_restart import Group


def test_reduces_use_the_communicator_that_a_restart_aborts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, opened = Group(), WeakKeyDictionary[Any, Any]()
    monkeypatch.setattr(reduce_group, "_opened", opened)
    monkeypatch.setattr(LauncherState, "cp_group", lambda self: group)
    monkeypatch.setattr(LauncherState, "tensor_parallel_group", lambda self: None)
    monkeypatch.setattr(opening, "startup_line", lambda *args: "")
    for given in ({}, {"inprocess_restart": True}):
        open_groups(LauncherState(LauncherOptions(MagiConfig()), args=arguments(**given)))
        assert (group in opened) == bool(given)
    assert opened[group] == {"cpu": None, "cuda": None}
