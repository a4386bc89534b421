"""Megatron's arguments under our switch: what is set, what is said of it, what is put back."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_magi.config import MagiConfig
from megatron_magi.launcher.flags import LauncherOptions
from megatron_magi.launcher.session import LauncherState
from megatron_magi.launcher.settings import (
    any_seq_length,
    change_settings,
    take_settings,
    wrap_validate_args,
)
from tests.launcher.few_arguments import arguments

NO_MASK = {"create_attention_mask_in_dataloader": False}


def test_settings_are_changed_and_said() -> None:
    args = arguments()
    mask, loss = change_settings(args)
    assert mask == (
        "--no-create-attention-mask-in-dataloader is set: the plan is the mask; pass it to stock "
        "runs with TransformerEngine too, which it makes faster"
    )
    assert loss.startswith("--calculate-per-token-loss is set: ranks hold")
    assert args.calculate_per_token_loss is True
    assert args.create_attention_mask_in_dataloader is False


def test_nothing_is_said_of_what_was_set() -> None:
    args = arguments(calculate_per_token_loss=True, **NO_MASK)
    assert change_settings(args) == []
    assert args.calculate_per_token_loss is True
    assert args.create_attention_mask_in_dataloader is False


@pytest.mark.parametrize(
    ("length", "cp", "positions", "seen"),
    [
        pytest.param(97, 2, 97, (100, 100), id="both go up"),
        pytest.param(97, 2, 4096, (100, 4096), id="positions are enough"),
        pytest.param(97, 3, 100, (102, 102), id="positions in between"),
        pytest.param(97, 2, 50, (100, 50), id="too few positions stay too few"),
        pytest.param(97, 2, None, (100, None), id="no positions"),
        pytest.param(1, 4, 1, (8, 8), id="one token"),
        pytest.param(96, 2, 96, (96, 96), id="divisible"),
        pytest.param(None, 2, 96, (None, 96), id="no length"),
    ],
)
def test_any_length_is_validated_and_put_back(
    length: int | None, cp: int, positions: int | None, seen: tuple[int | None, int | None]
) -> None:
    args = arguments(
        seq_length=length,
        encoder_seq_length=length,
        context_parallel_size=cp,
        max_position_embeddings=positions,
    )
    before = dict(vars(args))
    with any_seq_length(args):
        assert (args.seq_length, args.max_position_embeddings) == seen
        args.encoder_seq_length = args.seq_length  # as Megatron sets it
    assert vars(args) == before


def test_validation_is_between_our_settings(capsys: pytest.CaptureFixture[str]) -> None:
    launch = LauncherState(LauncherOptions(MagiConfig()))
    args = arguments(seq_length=97)

    def validate_args(given: Any, defaults: dict[str, Any]) -> str:
        assert given.seq_length == 100 and given.calculate_per_token_loss
        assert launch.args is None
        return f"validated with {defaults}"

    assert wrap_validate_args(validate_args, launch)(args, {}) == "validated with {}"
    assert launch.args is args and args.seq_length == 97
    said = capsys.readouterr().out
    assert "megatron_magi: --calculate-per-token-loss is set" in said
    wrap_validate_args(validate_args, LauncherState(LauncherOptions(MagiConfig())))
    assert capsys.readouterr().out == ""


def test_refusals_come_before_validation() -> None:
    def validate_args(given: Any) -> None:
        raise AssertionError("validated an argument that is refused")

    launch = LauncherState(LauncherOptions(MagiConfig()))
    args = arguments(yaml_cfg="run.yaml")
    with pytest.raises(SystemExit, match=r"requires yaml_cfg=None, got 'run.yaml'"):
        wrap_validate_args(validate_args, launch)(args)
    assert launch.args is None and args.calculate_per_token_loss is False


def test_gradients_are_not_averaged_and_it_is_said() -> None:
    args = arguments(calculate_per_token_loss=True, ddp_average_in_collective=True, **NO_MASK)
    (line,) = change_settings(args)
    assert line.startswith("--ddp-average-in-collective is not used: gradients are divided by")
    assert args.ddp_average_in_collective is False


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"cp_comm_type": ["p2p"]}, ["p2p"]),
        ({"cp_comm_type": ["p2p"], "fallback_to_eager_attn": False}, ["all_gather"]),
        ({"cp_comm_type": ["all_gather"], "fallback_to_eager_attn": False}, ["all_gather"]),
        (
            {
                "cp_comm_type": ["p2p"],
                "fallback_to_eager_attn": False,
                "transformer_impl": "transformer_engine",
            },
            ["p2p"],
        ),
        (
            {"cp_comm_type": ["a2a"], "fallback_to_eager_attn": None, "context_parallel_size": 1},
            ["a2a"],
        ),
    ],
    ids=["main", "dev", "already", "TransformerEngine", "one rank"],
)
def test_the_dev_branch_gets_the_communication_it_asks_for(
    given: dict[str, Any], wanted: list[str]
) -> None:
    args = arguments(calculate_per_token_loss=True, **NO_MASK, **given)
    said = change_settings(args)
    assert args.cp_comm_type == wanted
    assert bool(said) == (wanted != given["cp_comm_type"])


def test_deterministic_mode_is_about_attention_too() -> None:
    launch = LauncherState(LauncherOptions(MagiConfig(chunk_size=64)))
    take_settings(launch, arguments())
    take_settings(launch, arguments(deterministic_mode=False))
    assert launch.options.config == MagiConfig(chunk_size=64)
    take_settings(launch, arguments(deterministic_mode=True))
    assert launch.options.config == MagiConfig(chunk_size=64, deterministic=True)
