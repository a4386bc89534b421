"""The core attention on one process: Megatron's protocol, and what it refuses."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType as MegatronMaskType
from torch import Tensor

from megatron_magi.adapter.core_attention import MagiCoreAttention
from megatron_magi.adapter.packed import make_packed_seq_params
from megatron_magi.config import MagiConfig

HEADS, GROUPS, DIM = 4, 2, 8


def model(**changes: Any) -> TransformerConfig:
    return TransformerConfig(
        **{
            "num_layers": 2,
            "hidden_size": HEADS * DIM,
            "num_attention_heads": HEADS,
            "num_query_groups": GROUPS,
            "attention_dropout": 0.0,
            **changes,
        }
    )


def attention(config: TransformerConfig, **extra: Any) -> MagiCoreAttention:
    """As in a model that was attached."""
    module = MagiCoreAttention(
        config=config,
        layer_number=1,
        attn_mask_type=MegatronMaskType.causal,
        attention_type=extra.pop("attention_type", "self"),
        cp_comm_type="p2p",
        softmax_scale=extra.pop("softmax_scale", None),
        pg_collection=None,
        **extra,
    )
    module.is_attached = True
    return module


def qkv(rows: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 10 + batch)
    shapes = [(rows, batch, HEADS, DIM), (rows, batch, GROUPS, DIM), (rows, batch, GROUPS, DIM)]
    return tuple(  # type: ignore[return-value]
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in shapes
    )


def dense(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float | None = None) -> Tensor:
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, scale=scale, enable_gqa=True
    )
    return out.permute(2, 0, 1, 3).flatten(2)


@pytest.mark.parametrize("rotated", [True, False])
def test_values_do_not_hold_the_projection(rotated: bool) -> None:
    """Only where the keys are new tensors can the rest of the projection go."""
    x = torch.ones(6, 1, HEADS + 2 * GROUPS, DIM, dtype=torch.float64, requires_grad=True)
    projected = x * 2
    query, key, value = projected.split([HEADS, GROUPS, GROUPS], 2)
    query, key = (query * 1, key * 1) if rotated else (query, key)
    held = weakref.ref(projected.untyped_storage())
    out = attention(model())(query, key, value, None, packed_seq_params=None)
    del projected, query, key, value
    assert (held() is None) == rotated
    out.sum().backward()
    torch.testing.assert_close(
        x.grad[:, :, HEADS + GROUPS :].sum(), 2.0 * out.new_tensor(out.numel())
    )


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("batch", [1, 3])
def test_plain_batches_are_causal(batch: int, scale: float | None) -> None:
    tensors = qkv(12, batch)
    out = attention(model(), softmax_scale=scale)(*tensors, None, packed_seq_params=None)
    wanted = dense(*tensors, torch.ones(12, 12, dtype=torch.bool).tril(), scale)
    torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-10)
    assert out.shape == (12, batch, HEADS * DIM)
    assert out.is_contiguous()
    grad = torch.randn(out.shape, dtype=out.dtype)
    for got, want in zip(
        torch.autograd.grad(out, tensors, grad),
        torch.autograd.grad(wanted, tensors, grad),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_every_plain_batch_of_a_shape_has_the_same_plan() -> None:
    """A CUDA graph repeats it, with magi's settings of the model."""
    core = attention(model())
    core.attach(MagiConfig(deterministic=True))
    plan, _ = core._plan_and_group(None, 12, 2)
    assert plan.config.deterministic and plan.layout.total_seqlen == 24
    assert core._plan_and_group(None, 12, 2)[0] is plan


def test_a_graph_that_holds_attention_takes_no_plan() -> None:
    """Its replays would attend by the plan of the captured microbatch."""
    config = model(cuda_graph_impl="local")
    packed = make_packed_seq_params([0, 4, 11], config, None, device="cpu")
    with pytest.raises(ValueError, match="plain batches, got MagiPackedSeqParams with local over"):
        attention(config)(*qkv(11), None, packed_seq_params=packed)


def test_a_plain_batch_is_never_padded() -> None:
    """Nobody could take the padding off, whatever chunks and layers ask for."""
    core = attention(model(fp8="hybrid"))
    core.attach(MagiConfig(chunk_size=8))
    assert core(*qkv(11, 3), None).shape == (11, 3, HEADS * DIM)


def test_packed_documents_and_window_layers() -> None:
    config = model(window_size=(2, 0), window_attn_skip_freq=2)
    packed = make_packed_seq_params([0, 4, 11], config, None, device="cpu")
    tensors = qkv(11)
    document = torch.tensor([0] * 4 + [1] * 7)
    distance = torch.arange(11)[:, None] - torch.arange(11)[None]
    visible = (document[:, None] == document[None]) & (distance >= 0)
    layers = {1: visible & (distance <= 2), 2: visible}
    for number, seen in layers.items():
        core = attention(config)
        core.layer_number = number
        out = core(*tensors, None, attn_mask_type=MegatronMaskType.causal, packed_seq_params=packed)
        torch.testing.assert_close(out, dense(*tensors, seen), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_dropout": 0.1}, r"attention_dropout=0.0, got 0.1; set it so"),
        ({"hybrid_context_parallel": True}, r"hybrid_context_parallel=False"),
    ],
)
def test_settings_it_cannot_honour(changes: dict[str, Any], message: str) -> None:
    config = model()
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(NotImplementedError, match=r"MagiCoreAttention requires " + message):
        attention(config)


@pytest.mark.parametrize("name", ["qk_clip", "log_max_attention_logit"])
def test_logits_that_a_replay_would_not_hand_out(name: str) -> None:
    config = model(**{name: True})
    config.cuda_graph_impl = "local"
    with pytest.raises(NotImplementedError, match=r"without attention, got local over"):
        attention(config)


def test_a_scale_of_zero_is_refused() -> None:
    """And does not become the usual one, which it would where 0 means that none is given."""
    with pytest.raises(ValueError, match=r"softmax_scale must be between 1e-30 and 1e\+30, got 0"):
        attention(model(), softmax_scale=0.0)(*qkv(4), None)


def test_cross_attention_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"attention_type='self', got 'cross'"):
        attention(model(), attention_type="cross")


def test_only_the_heads_of_the_config_are_attended() -> None:
    """A plan is made from the config, so what the config does not know is refused."""
    q, k, _ = qkv(12)
    v = torch.randn(12, 1, GROUPS, 5, dtype=torch.float64)
    core = attention(model(), k_channels=DIM, v_channels=5)
    with pytest.raises(ValueError, match=r"heads that were planned, 4/2x8 .* v \[12, 2, 5\]"):
        core(q, k, v, None)
    assert attention(model(), k_channels=16, v_channels=5).softmax_scale == 0.25


def test_attributes_megatron_reads() -> None:
    core = attention(model())
    assert core.softmax_offset is None
    assert core.current_max_attn_logits is None
    assert list(core.parameters()) == []


def test_masks_come_from_the_plan_only() -> None:
    core, tensors = attention(model()), qkv(4)
    hidden = torch.zeros(1, 1, 4, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"attention_mask=None .* got a tensor of shape"):
        core(*tensors, hidden)
    with pytest.raises(ValueError, match=r"attention_bias=None"):
        core(*tensors, None, attention_bias=torch.zeros(1))


@pytest.mark.parametrize("kind", [MegatronMaskType.no_mask, MegatronMaskType.padding])
def test_a_plain_batch_is_of_a_causal_layer(kind: MegatronMaskType) -> None:
    core, tensors = attention(model()), qkv(4)
    with pytest.raises(ValueError, match=f"causal for a plain batch, got {kind.name}; pass Magi"):
        core(*tensors, None, kind)
    core.attn_mask_type = kind
    with pytest.raises(ValueError, match=f"got {kind.name}"):
        core(*tensors, None)
    full = make_packed_seq_params([0, 4], model(), None, mask="full", device="cpu")
    wanted = dense(*tensors, torch.ones(4, 4, dtype=torch.bool))
    torch.testing.assert_close(core(*tensors, None, packed_seq_params=full), wanted)


def test_cached_keys_are_refused() -> None:
    (q, _, _), (_, k, v) = qkv(1), qkv(5)
    with pytest.raises(ValueError, match=r"the query's rows and batch, got query \(1, .* key \(5,"):
        attention(model())(q, k, v, None)


def test_batches_that_were_not_prepared() -> None:
    tensors = qkv(4)
    stock = PackedSeqParams(qkv_format="thd")
    with pytest.raises(ValueError, match=r"requires MagiPackedSeqParams .* got PackedSeqParams"):
        attention(model())(*tensors, None, packed_seq_params=stock)
    with pytest.raises(ValueError, match=r"got NoneType with context_parallel_size=2"):
        attention(model(context_parallel_size=2))(*tensors, None)
    with pytest.raises(ValueError, match=r"requires sbhd tensors .* not a thd"):
        attention(model())(*(x[:, 0] for x in tensors), None, packed_seq_params=stock)
    packed = make_packed_seq_params([0, 5], model(), None, device="cpu")
    with pytest.raises(ValueError, match=r"requires the 5 rows .* got 4 rows x batch 1"):
        attention(model())(*tensors, None, packed_seq_params=packed)
