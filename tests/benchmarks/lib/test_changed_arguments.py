"""The table of arguments that the launcher changes."""

from __future__ import annotations

from benchmarks.lib.changed_arguments import ARGUMENTS
from megatron_magi.launcher.settings import (
    change_settings,
)
from tests.launcher.few_arguments import arguments


def test_every_changed_argument_is_in_the_table() -> None:
    args = arguments(
        ddp_average_in_collective=True, cp_comm_type=["p2p"], fallback_to_eager_attn=False
    )
    before = dict(vars(args))
    change_settings(args)
    changed = {name for name, value in vars(args).items() if value != before[name]}
    named = {change.name for change in ARGUMENTS}
    assert changed == named - {"attention_backend"}  # which Megatron's parser never sees
