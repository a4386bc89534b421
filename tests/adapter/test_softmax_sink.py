"""Softmax sinks of the core attention on one process, against a dense fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_magi.adapter.core_attention import MagiCoreAttention
from megatron_magi.adapter.packed import make_packed_seq_params
from tests.adapter.one_core import BOUNDS, GROUPS, HEADS, ROWS, attention, qkv, scores, visible


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
