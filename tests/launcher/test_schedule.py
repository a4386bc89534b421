"""What the launcher's hooks do around a schedule, without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_magi.adapter  # prepares megatron before it is imported
from megatron_magi.config import MagiConfig
from megatron_magi.launcher import schedule
from megatron_magi.launcher.flags import LauncherOptions
from megatron_magi.launcher.schedule import (
    counted_forward_step,
    of_whole_microbatches,
    run_schedule,
)
from megatron_magi.launcher.session import LauncherState
from tests.process_pool import pool

assert megatron_magi.adapter.MEGATRON_VERSION

LAUNCH = LauncherState(LauncherOptions(MagiConfig()))


def step_with(loss_function: Any) -> Any:
    return lambda iterator, model: (torch.ones(3), loss_function)


def test_a_loss_function_with_a_count_is_left_alone() -> None:
    result = torch.tensor(3.0), torch.tensor(3), {}
    output, loss_function = counted_forward_step(LAUNCH, step_with(lambda x: result))(None, None)
    assert loss_function(output) is result


def test_a_loss_function_without_a_count_is_refused() -> None:
    output, loss_function = counted_forward_step(LAUNCH, step_with(lambda x: (x.mean(), {})))(
        None, None
    )
    with pytest.raises(ValueError, match=r"must return \(sum of losses.*got 2 values"):
        loss_function(output)


def test_other_data_than_losses_may_have_any_form() -> None:
    step = step_with(lambda x, non_loss_data: {"logits": x})
    output, loss_function = counted_forward_step(LAUNCH, step)(None, None)
    assert loss_function(output, non_loss_data=True) == {"logits": output}


def test_a_script_without_our_models_is_refused() -> None:
    with pytest.raises(SystemExit, match="requires a GPTModel or HybridModel"):
        run_schedule(LAUNCH, lambda **unused: None)


def whole_reports(rank: int) -> list[dict[str, list[float]]]:
    reports = [
        {"lm loss": torch.tensor([4.0 * rank, 2.0 * rank]), "other": torch.tensor(float(rank))},
        {"lm loss": torch.tensor([1.0, 3.0]), "other": torch.tensor(7.0)},
    ]
    whole = of_whole_microbatches(reports, dist.group.WORLD)
    return [{name: value.view(-1).tolist() for name, value in each.items()} for each in whole]


def test_reports_of_a_whole_microbatch() -> None:
    """A rank without a counted token changes no mean."""
    first, second = pool(2).run(whole_reports)
    assert [each["lm loss"] for each in first] == [[4.0, 2.0], [2.0, 6.0]]
    assert [each["lm loss"] for each in second] == [each["lm loss"] for each in first]
    assert [each["other"] for each in first + second] == [[0.0], [7.0], [1.0], [7.0]]
    assert of_whole_microbatches([], dist.group.WORLD) == []


@pytest.mark.parametrize(
    ("changed", "reduces"),
    [
        ({}, True),
        ({"forward_only": False}, False),
        ({"collect_non_loss_data": True}, False),  # which one rank alone may do
        ({"sft": False}, False),
        ({"group": None}, False),
    ],
)
def test_only_validation_of_conversations_is_summed(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], reduces: bool
) -> None:
    given = {"forward_only": True, "collect_non_loss_data": False, "sft": True, "group": "cp"}
    given |= changed
    sft, group = given.pop("sft"), given.pop("group")
    launch = SimpleNamespace(args=SimpleNamespace(sft=sft), cp_group=lambda: group)
    monkeypatch.setattr(schedule, "run_schedule", lambda launch, step, **unused: ["reports"])
    monkeypatch.setattr(schedule, "of_whole_microbatches", lambda reports, group: [group])
    run = schedule.wrap_get_schedule(lambda: None, launch)()
    assert run(**given) == (["cp"] if reduces else ["reports"])
