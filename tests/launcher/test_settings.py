"""Megatron's arguments under our switch: every refusal refuses, and settings are put back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_magi.config import MagiConfig
from megatron_magi.launcher.flags import Options
from megatron_magi.launcher.launch import Launch
from megatron_magi.launcher.settings import (
    REFUSALS,
    Refusal,
    any_seq_length,
    change_settings,
    refuse_arguments,
    wrap_validate_args,
)

BAD: dict[str, Any] = {
    "attention_dropout": 0.1,
    "hierarchical_context_parallel_sizes": [2, 2],
    "sequence_packing_scheduler": "dp_balanced",
    "cuda_graph_impl": "local",
    "experimental_attention_variant": "dsa",
    "yaml_cfg": "run.yaml",
    "logits_load_dir": "logits",
    "logits_save_dir": "logits",
}
"""Values that are refused; True for an argument that is not named here."""


def arguments(**given: Any) -> SimpleNamespace:
    usual = {
        "rank": 0,
        "reset_attention_mask": False,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 2,
        "transformer_impl": "local",
        "calculate_per_token_loss": False,
        "create_attention_mask_in_dataloader": True,
        "seq_length": 96,
        "encoder_seq_length": 96,
        "max_position_embeddings": 96,
    }
    return SimpleNamespace(**{**usual, **given})


@pytest.mark.parametrize("rule", REFUSALS, ids=lambda rule: rule.argument)
def test_a_bad_value_ends_in_one_line(rule: Refusal) -> None:
    bad = BAD.get(rule.argument, True)
    assert bad not in rule.works
    with pytest.raises(SystemExit) as end:
        refuse_arguments(arguments(**{rule.argument: bad}))
    assert end.value.code == (
        f"--attention-backend magi requires {rule.argument}={rule.works[0]!r}, got {bad!r} "
        f"({rule.flag}); {rule.remedy}"
    )


@pytest.mark.parametrize("rule", REFUSALS, ids=lambda rule: rule.argument)
def test_good_values_are_taken(rule: Refusal) -> None:
    for good in rule.works:
        refuse_arguments(arguments(**{rule.argument: good}))


def test_arguments_that_a_version_lacks_refuse_nothing() -> None:
    refuse_arguments(arguments())


def test_rows_are_complete() -> None:
    names = [rule.argument for rule in REFUSALS]
    assert len(set(names)) == len(names) and set(BAD) < set(names)
    for rule in REFUSALS:
        assert rule.works and rule.remedy


def test_inference_layers_are_refused() -> None:
    with pytest.raises(SystemExit, match=r"local or transformer_engine, got inference_optimized;"):
        refuse_arguments(arguments(transformer_impl="inference_optimized"))


def test_settings_are_changed_and_said() -> None:
    args = arguments()
    assert change_settings(args).startswith("--calculate-per-token-loss is set: ranks hold")
    assert args.calculate_per_token_loss is True
    assert args.create_attention_mask_in_dataloader is False


def test_nothing_is_said_of_what_was_set() -> None:
    args = arguments(calculate_per_token_loss=True)
    assert change_settings(args) == ""
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
    launch = Launch(Options(MagiConfig()))
    args = arguments(seq_length=97)

    def validate_args(given: Any, defaults: dict[str, Any]) -> str:
        assert given.seq_length == 100 and given.calculate_per_token_loss
        assert launch.args is None
        return f"validated with {defaults}"

    assert wrap_validate_args(validate_args, launch)(args, {}) == "validated with {}"
    assert launch.args is args and args.seq_length == 97
    said = capsys.readouterr().out
    assert said.startswith("megatron_magi: --calculate-per-token-loss is set")
    wrap_validate_args(validate_args, Launch(Options(MagiConfig())))
    assert capsys.readouterr().out == ""


def test_refusals_come_before_validation() -> None:
    def validate_args(given: Any) -> None:
        raise AssertionError("validated an argument that is refused")

    launch = Launch(Options(MagiConfig()))
    args = arguments(async_save=True)
    with pytest.raises(SystemExit, match="requires async_save=False, got True"):
        wrap_validate_args(validate_args, launch)(args)
    assert launch.args is None and args.calculate_per_token_loss is False


def experts(**given: Any) -> SimpleNamespace:
    usual = {
        "num_experts": 4,
        "moe_router_load_balancing_type": "aux_loss",
        "seq_length": 96,
        "micro_batch_size": 1,
        "tensor_model_parallel_size": 1,
        "sequence_parallel": False,
    }
    return arguments(**{**usual, **given})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"seq_length": 97}, "a sequence length that 2 .* divides, got 97 tokens"),
        (
            {"tensor_model_parallel_size": 4, "sequence_parallel": True, "seq_length": 100},
            "a sequence length that 8 .* divides, got 100 tokens",
        ),
        (
            {"micro_batch_size": 2, "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]},
            "requires --micro-batch-size 1 beside seq_aux_loss, got 2",
        ),
    ],
)
def test_routers_that_would_count_other_rows(given: dict[str, Any], text: str) -> None:
    refuse_arguments(experts())
    refuse_arguments(experts(micro_batch_size=2))
    refuse_arguments(experts(**given, num_experts=None))
    with pytest.raises(SystemExit, match=text):
        refuse_arguments(experts(**given))
