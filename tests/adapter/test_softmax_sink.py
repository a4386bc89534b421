"""Softmax sinks and largest logits of the core attention on one process, against a dense fp64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType as MegatronMaskType
from torch import Tensor

from megatron_magi.adapter.core_attention import MagiCoreAttention
from megatron_magi.adapter.max_logit import check_max_logits
from megatron_magi.adapter.packed import make_packed_seq_params
from megatron_magi.config import MagiConfig

HEADS, GROUPS, DIM, ROWS = 4, 2, 8, 11
BOUNDS = [0, 1, 5, 11]


def attention(layer: int = 1, **changes: Any) -> MagiCoreAttention:
    config = TransformerConfig(
        **{
            "num_layers": 2,
            "hidden_size": HEADS * DIM,
            "num_attention_heads": HEADS,
            "num_query_groups": GROUPS,
            "attention_dropout": 0.0,
            "params_dtype": torch.float64,
            **changes,
        }
    )
    module = MagiCoreAttention(
        config=config,
        layer_number=layer,
        attn_mask_type=MegatronMaskType.causal,
        attention_type="self",
    )
    module.is_attached = True
    return module


def qkv(batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch)
    shapes = [(ROWS, batch, heads, DIM) for heads in (HEADS, GROUPS, GROUPS)]
    q, k, v = (torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def visible(window: int | None = None, bounds: list[int] | None = None) -> Tensor:
    """bool [T, T]: causal inside each document, at most `window` tokens back."""
    index = torch.arange(ROWS)
    document = torch.searchsorted(torch.tensor(bounds or BOUNDS), index, right=True)
    distance = index[:, None] - index[None]
    seen = (document[:, None] == document[None]) & (distance >= 0)
    return seen if window is None else seen & (distance <= window)


def scores(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """[batch, H, T, S] scaled scores, -inf where hidden."""
    k = k.repeat_interleave(HEADS // GROUPS, dim=2)
    found = torch.einsum("tbhd,sbhd->bhts", q, k) * DIM**-0.5
    return found.masked_fill(~seen, -torch.inf)


def dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sink_H: Tensor) -> Tensor:
    """The definition: the sink is one more column of scores whose value is 0."""
    found = scores(q, k, seen)
    column = sink_H.view(1, HEADS, 1, 1).expand(found.shape[0], -1, ROWS, 1)
    weights = torch.cat([found, column], dim=-1).softmax(-1)[..., :-1]
    v = v.repeat_interleave(HEADS // GROUPS, dim=2)
    return torch.einsum("bhts,sbhd->tbhd", weights, v).flatten(2)


def set_sink(core: MagiCoreAttention) -> Tensor:
    with torch.no_grad():
        core.softmax_offset.copy_(torch.tensor([-1.0, 0.5, 2.0, 0.0]))
    return core.softmax_offset


@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
@pytest.mark.parametrize("layer", [1, 2])
def test_sinks_of_window_and_full_layers(softmax_type: str, layer: int) -> None:
    """Layer 1 has the window, layer 2 sees whole documents."""
    window = {"window_size": (2, 0), "window_attn_skip_freq": 2}
    core = attention(layer, softmax_type=softmax_type, **window)
    packed = make_packed_seq_params(BOUNDS, core.config, None, device="cpu")
    learned = softmax_type == "learnable"
    sink = set_sink(core) if learned else torch.zeros(HEADS, dtype=torch.float64)
    assert torch.equal(core.softmax_offset, sink)
    tensors = [*qkv(), *([sink] if learned else [])]
    out = core(*tensors[:3], None, packed_seq_params=packed)
    wanted = dense(*tensors[:3], visible(2 if layer == 1 else None), sink)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    grad = torch.randn(out.shape, dtype=out.dtype)
    for got, want in zip(
        torch.autograd.grad(out, tensors, grad),
        torch.autograd.grad(wanted, tensors, grad),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def test_plain_batches_have_sinks_too() -> None:
    core, tensors = attention(softmax_type="learnable"), qkv(batch=3)
    sink = set_sink(core)
    wanted = dense(*tensors, visible(bounds=[0, ROWS]), sink)
    torch.testing.assert_close(core(*tensors), wanted, rtol=1e-12, atol=1e-12)
    # Without the sink it is another function.
    vanilla = attention()(*tensors)
    assert (vanilla - wanted).abs().max() > 0.1


def test_the_parameter_is_megatrons() -> None:
    core = attention(softmax_type="learnable", init_method=lambda w: torch.nn.init.constant_(w, 3))
    ((name, sink),) = core.named_parameters()
    assert name == "softmax_offset"
    assert sink.tolist() == [3.0] * HEADS
    assert sink.dtype == torch.float64
    assert (sink.tensor_model_parallel, sink.partition_dim, sink.partition_stride) == (True, 0, 1)
    halves = attention(softmax_type="learnable", tensor_model_parallel_size=2)
    assert halves.softmax_offset.shape == (HEADS // 2,)
    for softmax_type in ("vanilla", "off-by-one"):
        core = attention(softmax_type=softmax_type)
        assert list(core.parameters()) == []
        assert core.state_dict() == {}


def test_unknown_softmax_types_are_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"softmax_type .*got 'sparse'; choose one"):
        attention(softmax_type="sparse")


@pytest.mark.parametrize("setting", ["qk_clip", "log_max_attention_logit"])
def test_largest_logits_of_a_step(setting: str) -> None:
    core = attention()
    setattr(core.config, setting, True)
    packed = make_packed_seq_params(BOUNDS, core.config, None, device="cpu")
    wanted = torch.full((HEADS,), -torch.inf, dtype=torch.float64)
    for scale in (1.0, 2.0, 0.5):
        q, k, v = (x.detach() * scale for x in qkv())
        core(q, k, v, None, packed_seq_params=packed)
        wanted = torch.maximum(wanted, scores(q, k, visible()).amax((0, 2, 3)))
        torch.testing.assert_close(core.current_max_attn_logits, wanted, rtol=1e-12, atol=0)
    # Hidden scores are larger: the mask matters.
    assert (
        scores(q * 4, k * 4, torch.ones(ROWS, ROWS, dtype=torch.bool)).amax((0, 2, 3)) > wanted
    ).any()


def test_no_logits_are_kept_unasked() -> None:
    core = attention()
    core(*qkv())
    assert core.current_max_attn_logits is None


@pytest.mark.parametrize("setting", ["qk_clip", "log_max_attention_logit"])
def test_fused_kernels_keep_no_logits(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that a GPU would run is chosen by name; no GPU is needed to refuse it."""
    config = dataclasses.replace(attention().config, **{setting: True})
    device = torch.device("cuda")
    monkeypatch.setattr("megatron_magi.core.kernel.select.is_hopper", lambda _: False)
    with pytest.raises(NotImplementedError) as error:
        check_max_logits(config, MagiConfig(), torch.bfloat16, device)
    message = str(error.value)
    assert message.startswith(f"{setting} requires the reference kernel")
    assert "got 'flex' (kernel_backend='auto', torch.bfloat16 on cuda)" in message
    assert message.endswith(f"set {setting}=False, or kernel_backend='reference', which is slow")
    check_max_logits(config, MagiConfig(kernel_backend="reference"), torch.bfloat16, device)
    check_max_logits(config, MagiConfig(), torch.float32, device)
    check_max_logits(attention().config, MagiConfig(), torch.bfloat16, device)
