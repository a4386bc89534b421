"""What does not work ends in one line each, all at once, before anything is built."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_magi.config import MagiConfig
from megatron_magi.launcher import norms
from megatron_magi.launcher.constraints import REFUSALS, Refusal, refusals, refuse_arguments
from megatron_magi.launcher.job_sizes import heads_of
from megatron_magi.launcher.machine_constraints import machine_refusals
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


@pytest.mark.parametrize(
    "given",
    [
        {"cuda_graph_impl": "none"},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["moe_router"]},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "mlp"},
        {
            "cuda_graph_impl": "transformer_engine",
            "cuda_graph_modules": [],
            "cuda_graph_scope_deprecated": ["moe_router", "moe_preprocess"],
        },
    ],
)
def test_graphs_without_attention_are_taken(given: dict[str, Any]) -> None:
    refuse_arguments(arguments(**given))


@pytest.mark.parametrize(
    ("given", "got"),
    [
        ({"cuda_graph_impl": "transformer_engine"}, "transformer_engine over whole layers"),
        ({"cuda_graph_impl": "full_iteration"}, "full_iteration over whole layers"),
        (
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn", "moe_router"]},
            "transformer_engine over attn moe_router",
        ),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": ["moe_router"]}, "local over moe_router"),
    ],
)
def test_graphs_that_hold_attention_are_refused(given: dict[str, Any], got: str) -> None:
    with pytest.raises(SystemExit, match=rf"got {got} \(--cuda-graph-impl\)"):
        refuse_arguments(arguments(**given))


@pytest.mark.parametrize(
    ("magi", "text"),
    [
        ({"kernel_backend": "cuda"}, r"needs CUDA tensors, got cpu;.*\(--magi-kernel cuda\)"),
        ({"kernel_backend": "flex"}, r"needs CUDA tensors, got cpu;.*\(--magi-kernel flex\)"),
        ({"transport": "symm_mem"}, "--magi-transport symm_mem requires GPUs of one host"),
    ],
)
def test_what_this_machine_lacks_is_one_line(
    magi: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refuse_arguments(arguments(), MagiConfig(kernel_backend="reference", transport="all_to_all"))
    with pytest.raises(SystemExit, match=text):
        refuse_arguments(arguments(), MagiConfig(**magi))


def test_a_checkpoint_worker_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker would die, and the first save wait for it for ever."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    saves = {"async_save": True, "use_persistent_ckpt_worker": True}
    with pytest.raises(SystemExit, match="--use-persistent-ckpt-worker requires a GPU"):
        refuse_arguments(arguments(**saves))
    refuse_arguments(arguments(**{**saves, "async_save": False}))


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


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_heads_that_no_key_head_serves_are_refused(kernel: Any) -> None:
    given = arguments(num_attention_heads=4, group_query_attention=True, num_query_groups=3)
    (line,) = refusals(given, MagiConfig(kernel_backend=kernel))
    assert "num_heads_q must be a multiple of num_heads_kv, got 4 and 3" in line
    assert line.endswith(
        "(--num-attention-heads, --num-query-groups, --tensor-model-parallel-size)"
    )


LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "num_query_groups": 1,
}


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        (LATENT, (4, 192, 128)),
        ({**LATENT, "hybrid_layer_pattern": "+-"}, (4, 192, 128)),
        ({**LATENT, "hybrid_layer_pattern": "*-"}, (1, 16, 16)),
        ({**LATENT, "multi_latent_attention": False}, (1, 16, 16)),
    ],
)
def test_heads_are_those_that_the_model_will_have(
    given: dict[str, Any], shape: tuple[int, ...]
) -> None:
    heads = heads_of(arguments(**given))
    assert (heads.num_heads_kv, heads.head_dim, heads.value_dim) == shape


def test_heads_that_a_checkpoint_brings_refuse_nothing() -> None:
    assert not refusals(arguments(num_attention_heads=None, hidden_size=None))


@pytest.mark.parametrize(("chunk", "accepted"), [(96, True), (191, True), (192, False)])
def test_every_rank_gets_a_chunk(chunk: int, accepted: bool) -> None:
    magi = MagiConfig(chunk_size=chunk)
    for sizes in ({"micro_batch_size": 2}, {"micro_batch_size": 1, "eval_micro_batch_size": 2}):
        lines = refusals(arguments(**sizes, context_parallel_size=2), magi)  # 192 tokens
        found = [line for line in lines if "192 tokens" in line]
        assert bool(found) is not accepted
        assert all(line.endswith("use at most 191, or None (--magi-chunk-size)") for line in found)
    for unknown in ({"micro_batch_size": None}, {"seq_length": None, "encoder_seq_length": None}):
        assert not refusals(arguments(**unknown), magi)


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


@pytest.mark.parametrize(
    "name", ["tensor_model_parallel_size", "num_attention_heads", "num_query_groups", "seq_length"]
)
def test_sizes_below_one_are_one_line(name: str) -> None:
    given = arguments(**{name: 0}, attention_dropout=0.1)
    flag = name.replace("_", "-")
    assert refusals(given, MagiConfig(kernel_backend="reference")) == [
        f"--{flag} must be at least 1, got 0; change it"
    ]
    assert machine_refusals(given, MagiConfig(kernel_backend="reference")) == []


def test_heads_are_shared_out_over_tensor_ranks() -> None:
    (line,) = refusals(arguments(num_attention_heads=4, tensor_model_parallel_size=3))
    assert line.endswith("got 4 and 3; change one of them")
    assert not refusals(arguments(num_attention_heads=6, tensor_model_parallel_size=3))
    grouped = {"num_attention_heads": 12, "group_query_attention": True}
    for groups, ranks, accepted in ((4, 2, 1), (2, 4, 1), (4, 3, 0), (3, 2, 0)):
        given = arguments(**grouped, num_query_groups=groups, tensor_model_parallel_size=ranks)
        assert (not refusals(given)) == bool(accepted), (groups, ranks)


@pytest.mark.parametrize("name", ["reset_attention_mask", "reset_position_ids"])
def test_conversations_are_documents_already(name: str) -> None:
    assert not refusals(arguments(**{name: True})) and not refusals(arguments(sft=True))
    (line,) = refusals(arguments(sft=True, **{name: True}))
    assert f"without --{name.replace('_', '-')}, got both" in line


def test_multi_token_prediction_needs_transformer_engine_in_one_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron_magi.launcher import machine_constraints as rules

    given = arguments(mtp_num_layers=1)
    monkeypatch.setattr(rules.importlib.util, "find_spec", lambda name: None)
    for version, count in (((0, 19, 2), 0), ((0, 20, 0), 1)):
        monkeypatch.setattr(rules, "MEGATRON_VERSION", version)
        lines = refusals(given)
        assert len(lines) == count and all("--mtp-num-layers requires" in line for line in lines)
    monkeypatch.setattr(rules.importlib.util, "find_spec", lambda name: object())
    assert not refusals(given)


def test_heads_that_a_checkpoint_brings_are_no_question_for_a_kernel() -> None:
    given = arguments(num_attention_heads=None, hidden_size=None)
    assert not refusals(given, MagiConfig(kernel_backend="reference"))


def test_experts_need_microbatches_without_padding_in_validation_too() -> None:
    given = {"num_experts": 4, "context_parallel_size": 4, "seq_length": 1072}
    assert not refusals(arguments(**given, micro_batch_size=2))
    (line,) = refusals(arguments(**given, micro_batch_size=2, eval_micro_batch_size=1))
    assert "got 1072 tokens" in line and "hold as 1088" in line


def test_samples_are_dealt_by_the_cost_of_their_documents() -> None:
    documents = {"dataloader_inter_document_masking": True}
    for given in (documents, {"sft": True}, {"reset_attention_mask": True}):
        assert refusals(arguments(**given), balance_step=True) == []
    assert refusals(arguments(dataloader_type="external")) == []
    external = arguments(dataloader_type="external")
    lines = refusals(external, mask_name="masks:frames", balance_step=True)
    for line, said in zip(
        lines,
        (
            "requires --dataloader-type single or cyclic, got external, whose loader",
            "requires the cost of a sample before its rows are read, got --magi-mask masks:frames;",
            "requires documents in a sample, got none, so that all samples cost the same; pass",
        ),
        strict=True,
    ):
        assert line.startswith(f"--magi-balance-step {said}") and "; " in line
    with pytest.raises(SystemExit, match="requires documents in a sample"):
        refuse_arguments(arguments(), balance_step=True)
