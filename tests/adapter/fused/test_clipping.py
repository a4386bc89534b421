"""Norm and clipping of all gradients at once, against Megatron's functions in fp64."""

import pytest
import torch

import megatron_magi.adapter  # noqa: F401
from megatron_magi.adapter.fused.clipping import install_foreach, l2_norm, scale

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = ((300, 7), (1,), (64,), (0,))


def tensors(seed):
    torch.manual_seed(seed)
    return [torch.randn(shape, device=DEVICE) for shape in SHAPES]


@pytest.fixture
def clip_grads(monkeypatch):
    from megatron.core.optimizer import clip_grads

    for name in ("l2_norm_impl", "multi_tensor_scale_impl"):
        monkeypatch.setattr(clip_grads, name, getattr(clip_grads, name))
    return clip_grads


def test_the_norm_is_that_of_all_elements():
    lists = [tensors(0), tensors(1)]
    norm, per_tensor = l2_norm(1, None, lists, False)
    want = torch.cat([t.double().flatten() for some in lists for t in some]).norm()
    assert norm.shape == (1,) and norm.dtype == torch.float32 and per_tensor is None
    torch.testing.assert_close(norm[0].double(), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_norm_of_16_bit_gradients_is_not_rounded_to_16_bits(dtype):
    some = [torch.full((10_001,), 1000.0, dtype=dtype, device=DEVICE)]
    norm, _ = l2_norm(1, None, [some], False)  # above fp16's range
    want = some[0].double().norm()
    torch.testing.assert_close(norm[0].double(), want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_norm_shows_what_is_not_finite(value):
    some = tensors(0)
    some[1][0] = value
    norm, _ = l2_norm(1, None, [some], False)
    assert not norm.isfinite()


@pytest.mark.parametrize("in_place", [True, False])
def test_scaling_leaves_the_sources_alone_unless_they_are_the_targets(in_place):
    sources = tensors(0)
    targets = sources if in_place else tensors(1)
    want = [t * 0.25 for t in sources]
    before = [t.clone() for t in sources]
    scale(1, None, [sources, targets], 0.25)
    assert all(torch.equal(t, w) for t, w in zip(targets, want, strict=True))
    if not in_place:
        assert all(torch.equal(s, b) for s, b in zip(sources, before, strict=True))


def test_parameters_without_gradients_are_nothing_to_scale():
    scale(1, None, [[], []], 0.5)


def test_megatrons_clipping_takes_them(clip_grads):
    install_foreach()
    assert (clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl) == (l2_norm, scale)
    install_foreach()
    lists = [tensors(0), tensors(0)]
    clip_grads.multi_tensor_applier(clip_grads.multi_tensor_scale_impl, None, lists, 0.5)
    assert torch.equal(lists[1][0], lists[0][0] * 0.5)
