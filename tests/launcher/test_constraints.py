"""What does not work ends in one line each, all at once, before anything is built."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_magi.launcher import norms
from megatron_magi.launcher.constraints import REFUSALS, Refusal, refusals, refuse_arguments
from tests.launcher.few_arguments import arguments

BAD: dict[str, Any] = {
    "attention_dropout": 0.1,
    "hierarchical_context_parallel_sizes": [2, 2],
    "sequence_packing_scheduler": "dp_balanced",
    "experimental_attention_variant": "dsa",
    "yaml_cfg": "run.yaml",
    "logits_load_dir": "logits",
    "logits_save_dir": "logits",
}
"""Values that are refused; True for an argument that is not named here."""


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


def test_everything_is_refused_at_once() -> None:
    given = arguments(attention_dropout=0.1, yaml_cfg="run.yaml", hybrid_layer_pattern="*D")
    lines = refusals(given)
    assert len(lines) == 3 and not any("\n" in line for line in lines)
    for line, named in zip(lines, ("attention-dropout", "yaml-cfg", "hybrid-layer"), strict=True):
        assert f"(--{named}" in line
    with pytest.raises(SystemExit) as end:
        refuse_arguments(given)
    assert end.value.code == "\n".join(lines)


def test_rows_are_complete() -> None:
    names = [rule.argument for rule in REFUSALS]
    assert len(set(names)) == len(names) and set(BAD) < set(names)
    for rule in REFUSALS:
        assert rule.works and rule.remedy


def test_inference_layers_are_refused() -> None:
    with pytest.raises(SystemExit, match=r"local or transformer_engine, got inference_optimized;"):
        refuse_arguments(arguments(transformer_impl="inference_optimized"))


@pytest.mark.parametrize("kind", ["rope", "yarn", "learned_absolute", "none"])
def test_positions_of_one_dimension_are_taken(kind: str) -> None:
    refuse_arguments(arguments(position_embedding_type=kind))


def test_positions_of_several_dimensions_are_refused() -> None:
    with pytest.raises(SystemExit, match=r"got mrope \(--position-embedding-type\)"):
        refuse_arguments(arguments(position_embedding_type="mrope"))


def test_latent_attention_with_tensor_parallelism_has_sequence_parallelism() -> None:
    split = {"multi_latent_attention": True, "tensor_model_parallel_size": 2}
    refuse_arguments(arguments(**split, sequence_parallel=True))
    refuse_arguments(arguments(tensor_model_parallel_size=2))
    with pytest.raises(SystemExit, match=r"requires --sequence-parallel with .* got 2 tensor"):
        refuse_arguments(arguments(**split))


EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_router_load_balancing_type": "aux_loss"}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"seq_length": 97}, r"got 97 tokens \(--seq-length\), which 2 ranks hold as 98"),
        ({"seq_length": 2 * 4099}, r"got 8198 tokens .* which 2 ranks hold as 8448"),
        (
            {"tensor_model_parallel_size": 4, "sequence_parallel": True, "seq_length": 100},
            r"got 100 tokens \(--seq-length\), which 2 ranks hold as 104",
        ),
        ({"fp8": "hybrid"}, r"got 80 tokens \(--seq-length\), which 2 ranks hold as 96"),
    ],
)
def test_routers_that_would_count_other_rows(given: dict[str, Any], text: str) -> None:
    usual = {**EXPERTS, "seq_length": 80}
    refuse_arguments(arguments(**usual))
    refuse_arguments(arguments(**{**usual, "micro_batch_size": 2}))
    refuse_arguments(arguments(**{**usual, **given, "num_experts": None}))
    with pytest.raises(SystemExit, match=text):
        refuse_arguments(arguments(**{**usual, **given}))


def test_the_overlapped_schedule_tells_routers_no_samples() -> None:
    given = {
        **EXPERTS,
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
        "overlap_moe_expert_parallel_comm": True,
    }
    refuse_arguments(arguments(**given))
    with pytest.raises(SystemExit, match=r"requires --micro-batch-size 1 with seq_aux_loss and"):
        refuse_arguments(arguments(**given, micro_batch_size=2))


def test_sequence_parallelism_without_fused_norms_has_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments(
        sequence_parallel=True, tensor_model_parallel_size=2, normalization="LayerNorm"
    )
    monkeypatch.setattr(norms, "HAS_FUSED_NORMS", False)
    (line,) = refusals(given)
    assert "requires --normalization RMSNorm, got LayerNorm; install one" in line
    assert not refusals(given, here=False)  # another machine may have them
    given.normalization = "RMSNorm"
    assert not refusals(given)
    assert not refusals(arguments(sequence_parallel=True, normalization="LayerNorm"))
    given.normalization = "LayerNorm"
    monkeypatch.setattr(norms, "HAS_FUSED_NORMS", True)
    assert not refusals(given)


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"qk_clip": True, "tensor_model_parallel_size": 2}, "--qk-clip"),
        ({"mtp_hsm": True}, "--mtp-hsm"),
        (
            {
                "mtp_hsm": True,
                "context_parallel_size": 1,
                "sequence_parallel": True,
                "tensor_model_parallel_size": 2,
            },
            "--mtp-hsm",
        ),
        ({"pipeline_model_parallel_layout": "Et*7|tm|L"}, "--pipeline-model-parallel-layout"),
        (
            {"pipeline_model_parallel_layout": [["embedding", "decoder"], ["mtp"], ["loss"]]},
            "--pipeline-model-parallel-layout",
        ),
    ],
)
def test_what_the_model_would_refuse_is_refused_before_it(given: dict[str, Any], flag: str) -> None:
    (line,) = refusals(arguments(**given))
    assert f"({flag})" in line
    assert not refusals(
        arguments(
            qk_clip=True,
            mtp_hsm=True,
            context_parallel_size=1,
            sequence_parallel=True,  # which Megatron switches off for one tensor-parallel rank
            pipeline_model_parallel_layout=[["embedding", "decoder"], ["mtp", "loss"]],
        )
    )


@pytest.mark.parametrize("name", ["reset_attention_mask", "reset_position_ids"])
def test_conversations_are_documents_already(name: str) -> None:
    assert not refusals(arguments(**{name: True})) and not refusals(arguments(sft=True))
    (line,) = refusals(arguments(sft=True, **{name: True}))
    assert f"without --{name.replace('_', '-')}, got both" in line


def test_experts_need_microbatches_without_padding_in_validation_too() -> None:
    given = {"num_experts": 4, "context_parallel_size": 4, "seq_length": 1072}
    assert not refusals(arguments(**given, micro_batch_size=2))
    (line,) = refusals(arguments(**given, micro_batch_size=2, eval_micro_batch_size=1))
    assert "got 1072 tokens" in line and "hold as 1088" in line
