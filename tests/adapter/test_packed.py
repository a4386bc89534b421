"""From boundaries to plans and positions, alike on every stage."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig

from megatron_magi import PrefixTree, masks
from megatron_magi.adapter.model_shape import head_shape
from megatron_magi.adapter.packed import (
    MagiPackedSeqParams,
    from_packed_seq_params,
    make_packed_seq_params,
    pipeline_seq_length,
)
from megatron_magi.adapter.rope import MagiRotaryEmbedding
from megatron_magi.core.runtime.plan_cache import cached_plan, layer_plans_for, plan_for
from megatron_magi.core.runtime.prepared import prepare
from megatron_magi.core.runtime.token_dispatch import position_ids

BOUNDS = [0, 5, 6, 16]


def model(**changes: Any) -> TransformerConfig:
    return TransformerConfig(
        **{
            "num_layers": 4,
            "hidden_size": 16,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "attention_dropout": 0.0,
            **changes,
        }
    )


def test_causal_documents_with_restarting_positions() -> None:
    packed = make_packed_seq_params(BOUNDS, model(), None, device="cpu")
    assert packed.window_plan is None
    assert packed.token_plan.mask == masks.from_cu_seqlens(BOUNDS)
    assert packed.rope_positions.tolist() == [*range(5), 0, *range(10)]
    assert packed.qkv_format == "sbhd"
    assert packed.max_seqlen_q == packed.max_seqlen_kv == 16


def test_a_planned_batch_is_prepared_in_the_thread_that_plans_it() -> None:
    config = model(window_size=(3, 0), window_attn_skip_freq=2)
    cached_plan.cache_clear()
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(make_packed_seq_params, BOUNDS, config, None, device="cpu").result()
    for plan in (made.plan, made.window_plan):
        assert plan is not None and (0, torch.device("cpu")) in plan._kept.prepared
        ready = plan._kept.prepared[0, torch.device("cpu")]
        assert prepare(plan, None, "cpu") is ready and ready.forward


def test_positions_of_one_stream_under_a_mask_of_documents() -> None:
    mask = masks.from_cu_seqlens(BOUNDS)
    packed = make_packed_seq_params([0, 16], model(), None, mask=mask, device="cpu")
    assert packed.token_plan.mask == mask
    assert packed.rope_positions.tolist() == list(range(16))


def test_a_tree_has_positions_along_its_branches() -> None:
    tree = PrefixTree((6, 5, 5), (-1, 0, 0))
    packed = make_packed_seq_params([0, 16], model(), None, mask=tree, device="cpu")
    assert packed.token_plan.mask == tree.mask()
    assert packed.rope_positions.tolist() == [*range(11), *range(6, 11)]
    masked = make_packed_seq_params([0, 16], model(), None, mask=tree.mask(), device="cpu")
    assert masked.digest != packed.digest, "ranks with other positions notice"
    with pytest.raises(ValueError, match=r"must fill the stream, got cu_seqlens \[0, 5, 6, 16\]"):
        make_packed_seq_params(BOUNDS, model(), None, mask=tree)
    with pytest.raises(NotImplementedError, match=r"without window layers, .* window_size=.3, 0."):
        make_packed_seq_params([0, 16], model(window_size=(3, 0)), None, mask=tree)
    with pytest.raises(NotImplementedError, match="without multi-token prediction"):
        make_packed_seq_params([0, 16], model(mtp_num_layers=1), None, mask=tree)
    with pytest.raises(NotImplementedError, match="window"):
        windows = model(window_size=(3, 0), window_attn_skip_freq=2)
        make_packed_seq_params([0, 16], windows, None, mask=tree)


@pytest.mark.parametrize("bounds", [[], [0], [1, 4], [0, 4, 3], [0, 0]])
def test_bad_boundaries(bounds: list[int]) -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens must be prefix sums .* got .*; pass \[0"):
        make_packed_seq_params(bounds, model(), None)


@pytest.mark.parametrize(
    "bounds",
    [[0, 7.5, 16], torch.tensor([0.0, 16.0]), [False, True], [0, "16"], "0,16", None, [0, 2**64]],
)
def test_boundaries_are_integers(bounds: Any) -> None:
    """A fraction would be cut off, and documents would end elsewhere."""
    with pytest.raises(TypeError, match="cu_seqlens must hold integers, got"):
        make_packed_seq_params(bounds, model(), None)


def test_one_stream_has_one_row_of_boundaries() -> None:
    packed = make_packed_seq_params(torch.tensor([BOUNDS]), model(), None, device="cpu")
    assert packed.token_plan.mask == masks.from_cu_seqlens(BOUNDS)
    with pytest.raises(ValueError, match="cu_seqlens must be prefix sums"):
        make_packed_seq_params([[0, 5], [9, 16]], model(), None)


@pytest.mark.parametrize(
    "options, error, match",
    [
        ({"magi_config": {}}, TypeError, "config must be a MagiConfig, got {}"),
        ({"device": "gpu"}, ValueError, "device must be a torch device, got 'gpu'"),
    ],
)
def test_wrong_options_are_refused(options: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make_packed_seq_params(BOUNDS, model(), None, **options)


@pytest.mark.parametrize("config", [None, {}])
def test_no_model_config_is_refused(config: Any) -> None:
    said = r"model_config must have the fields of a TransformerConfig, got .*; pass the config"
    with pytest.raises(TypeError, match=said):
        make_packed_seq_params(BOUNDS, config, None)
    with pytest.raises(TypeError, match=said):
        pipeline_seq_length(16, config)


@pytest.mark.parametrize("group", [1, "cp"])
def test_a_group_is_no_number(group: Any) -> None:
    with pytest.raises(TypeError, match=r"cp_group must be a ProcessGroup, .* or None, got"):
        make_packed_seq_params(BOUNDS, model(), group)


def thd(**fields: Any) -> PackedSeqParams:
    tensors = {k: torch.tensor(v, dtype=torch.int32) for k, v in fields.items()}
    return PackedSeqParams(qkv_format="thd", **tensors)


def test_from_stock_thd() -> None:
    stock = thd(cu_seqlens_q=BOUNDS, cu_seqlens_kv=BOUNDS)
    packed = from_packed_seq_params(stock, model(), None, device="cpu")
    assert isinstance(packed, MagiPackedSeqParams)
    assert packed.token_plan.mask == masks.from_cu_seqlens(BOUNDS)


def first_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan as rank 0 of two, without a second process."""
    adapter = "megatron_magi.adapter"
    monkeypatch.setattr(
        f"{adapter}.document_plans.layer_plans_for",
        lambda layers, _, *a, **b: layer_plans_for(layers, 2, *a, **b),
    )
    monkeypatch.setattr(f"{adapter}.packed.position_ids", lambda plan, _: position_ids(plan, 0))


@pytest.mark.parametrize("factor", [None, 4.0])
def test_rotary_angles_are_stock_ones_of_the_positions(
    factor: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    given = {"kv_channels": 16, "rotary_percent": 1.0, "seq_len_interpolation_factor": factor}
    stock = RotaryEmbedding(**given, use_cpu_initialization=True)
    ours = MagiRotaryEmbedding.from_stock(RotaryEmbedding(**given, use_cpu_initialization=True))
    wanted = stock(100)
    assert torch.equal(ours(100), wanted), "no positions: the stock module"
    ours.positions = torch.tensor([3, 99, 0, 3, 41])
    torch.testing.assert_close(ours(5), wanted[ours.positions], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tp", [3, 6])
def test_padded_lengths_divide_over_sequence_parallel_ranks(
    tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_of_two_ranks(monkeypatch)
    config = model(
        hidden_size=48, num_attention_heads=12, num_query_groups=6, sequence_parallel=True,
        tensor_model_parallel_size=tp, context_parallel_size=2,
    )  # fmt: skip
    packed = make_packed_seq_params([0, 1000, 4097], config, None, device="cpu")
    assert packed.token_plan.layout.num_local_tokens % tp == 0
    assert packed.token_plan.layout.padded_seqlen == pipeline_seq_length(4097, config)


def test_padding_between_documents_is_a_document_of_its_own() -> None:
    stock = thd(cu_seqlens_q=[0, 5, 8], cu_seqlens_q_padded=[0, 8, 12])
    packed = from_packed_seq_params(stock, model(), None, device="cpu")
    assert packed.token_plan.mask == masks.from_cu_seqlens([0, 5, 8, 11, 12])


def test_stock_params_that_are_not_self_attention_over_a_stream() -> None:
    with pytest.raises(ValueError, match=r"must be thd with cu_seqlens_q, got qkv_format='bshd'"):
        from_packed_seq_params(PackedSeqParams(qkv_format="bshd"), model(), None)
    with pytest.raises(ValueError, match=r"equal document boundaries .* pass one cu_seqlens"):
        from_packed_seq_params(thd(cu_seqlens_q=[0, 4], cu_seqlens_kv=[0, 5]), model(), None)
    padded = {"cu_seqlens_q_padded": [0, 8], "cu_seqlens_kv_padded": [0, 9]}
    with pytest.raises(ValueError, match=r"equal document boundaries .* \[0, 8\] and \[0, 9\]"):
        from_packed_seq_params(thd(cu_seqlens_q=[0, 4], **padded), model(), None)
    with pytest.raises(TypeError, match=r"stock must be a PackedSeqParams, got None"):
        from_packed_seq_params(None, model(), None)
    with pytest.raises(ValueError, match=r"must have room for every document"):
        from_packed_seq_params(thd(cu_seqlens_q=[0, 4], cu_seqlens_q_padded=[0, 3]), model(), None)


@pytest.mark.parametrize(("length", "tp", "wanted"), [(16, 1, 16), (17, 1, 18), (17, 2, 20)])
def test_pipeline_length_depends_on_lengths_only(length: int, tp: int, wanted: int) -> None:
    config = model(context_parallel_size=2, tensor_model_parallel_size=tp, sequence_parallel=tp > 1)
    assert pipeline_seq_length(length, config) == wanted
    for mask in (masks.causal(length), masks.full(length), masks.from_cu_seqlens([0, 2, length])):
        plan = plan_for(mask, 2, head_shape(config), token_multiple=tp)
        assert plan.layout.padded_seqlen == wanted
