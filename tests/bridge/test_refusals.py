"""Bridge's settings under the launcher's rules and Bridge's own, without Bridge."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_magi import MagiConfig
from megatron_magi.bridge.arguments import arguments_of, in_words_of_bridge
from megatron_magi.bridge.refusals import refuse_config
from megatron_magi.launcher.flags import LauncherOptions


class Provider(SimpleNamespace):
    """As a provider of Bridge's that builds a GPTModel."""

    def provide(self) -> None: ...


class OtherProvider(Provider):
    """One whose model is its own."""

    def provide(self) -> None: ...

    provide.__module__ = "megatron.bridge.models.gemma.gemma3_provider"


class VisionProvider(Provider):
    """Bridge's provider of Qwen3-VL."""

    def provide(self) -> None: ...

    provide.__module__ = "megatron.bridge.models.qwen_vl.qwen3_vl_provider"


def config(kind: type = Provider, **changes: Any) -> SimpleNamespace:
    """A recipe's settings as far as the rules read them; changes are fields by part__field."""
    model = kind(
        attention_dropout=0.0,
        calculate_per_token_loss=False,
        context_parallel_size=2,
        hidden_size=64,
        num_attention_heads=4,
        num_moe_experts=None,
        pipeline_model_parallel_size=1,
        position_embedding_type="rope",
        seq_length=96,
        sequence_parallel=False,
        tensor_model_parallel_size=1,
    )
    parts = {
        "model": model,
        "comm_overlap": None,
        "mixed_precision": "bf16_mixed",
        "train": SimpleNamespace(micro_batch_size=2),
        "dataset": SimpleNamespace(seq_length=96),
        "dist": SimpleNamespace(use_decentralized_pg=False, eval_context_parallel_size=None),
        "ddp": SimpleNamespace(average_in_collective=True),
    }
    for name, value in changes.items():
        part, field = name.split("__")
        setattr(parts.setdefault(part, SimpleNamespace()), field, value)
    return SimpleNamespace(**parts)


@pytest.fixture(autouse=True)
def _engine_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: object() if name == "transformer_engine" else find(name, *rest),
    )


DEFAULT = LauncherOptions(MagiConfig())


def lines(settings: SimpleNamespace, options: LauncherOptions = DEFAULT) -> list[str]:
    with pytest.raises(SystemExit) as refused:
        refuse_config(settings, options)
    return str(refused.value.code).splitlines()


def test_a_plain_recipe_starts() -> None:
    refuse_config(config(), DEFAULT)


def test_packs_of_qwen3_vl_start() -> None:
    refuse_config(vision_config(enable_in_batch_packing=True), DEFAULT)


def test_other_batches_of_qwen3_vl_are_refused() -> None:
    (line,) = lines(vision_config(enable_in_batch_packing=False))
    assert "VisionProvider requires dataset.enable_in_batch_packing=True, got False" in line


def test_mrope_of_another_provider_is_refused() -> None:
    (line,) = lines(config(model__position_embedding_type="mrope"))
    assert "got mrope" in line


def vision_config(**dataset: Any) -> SimpleNamespace:
    given = {f"dataset__{name}": value for name, value in dataset.items()}
    return config(VisionProvider, model__position_embedding_type="mrope", **given)


def test_settings_become_arguments() -> None:
    args = arguments_of(config(dataset__enable_offline_packing=True, model__num_moe_experts=8))
    assert (args.micro_batch_size, args.num_experts, args.bf16, args.sft) == (2, 8, True, True)
    assert args.ddp_average_in_collective


def test_a_model_config_holds_a_transformer_config() -> None:
    settings = config()
    settings.model = SimpleNamespace(transformer=settings.model, seq_length=64)
    args = arguments_of(settings)
    assert (args.hidden_size, args.seq_length) == (64, 64)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__attention_dropout": 0.1}, "requires attention_dropout=0.0, got 0.1"),
        ({"inprocess_restart__enabled": True}, "(inprocess_restart.enabled)"),
        ({"model__restore_modelopt_state": True}, "(restore_modelopt_state)"),
        ({"dist__use_decentralized_pg": True}, "dist.use_decentralized_pg=True"),
        ({"dist__eval_context_parallel_size": 1}, "dist.eval_context_parallel_size=1"),
        ({"kind": OtherProvider}, "got OtherProvider"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_work_is_refused_in_one_line(changes: dict[str, Any], words: str) -> None:
    (line,) = lines(config(**changes))
    assert line.startswith("megatron_magi: use_magi requires") and words in line
    assert "--" not in line


def test_all_refusals_come_at_once() -> None:
    wrong = config(OtherProvider, model__attention_dropout=0.1, dist__use_decentralized_pg=True)
    assert len(lines(wrong)) == 3


def test_the_same_context_parallel_size_for_validation_is_accepted() -> None:
    refuse_config(config(dist__eval_context_parallel_size=2), DEFAULT)


def test_flags_are_named_as_fields() -> None:
    line = "--attention-backend magi requires --num-experts 0 and --micro-batch-size 1"
    assert in_words_of_bridge(line) == "use_magi requires num_moe_experts 0 and " + (
        "train.micro_batch_size 1"
    )


def test_refusals_of_our_own_settings_are_in_words_of_bridge() -> None:
    (line,) = lines(config(), LauncherOptions(MagiConfig(chunk_size=192)))
    assert line.endswith("use at most 191, or None (chunk_size)") and "--" not in line
    packed = {"dataset__enable_offline_packing": True, "dataset__reset_position_ids": True}
    (line,) = lines(config(**packed))
    assert "packing requires a job without dataset.reset_position_ids, got both" in line


def test_a_layout_of_stages_that_bridge_has_read_is_no_question_here() -> None:
    refuse_config(config(model__pipeline_model_parallel_layout=object()), DEFAULT)
