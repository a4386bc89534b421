"""The addition that computes the norm behind it: bits of two kernels, and when it stays away."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from tests.adapter.interpreter import DEVICE  # isort: skip

import megatron_magi.adapter  # noqa: F401
from megatron_magi.adapter.fused import norm as norms
from megatron_magi.adapter.fused.norm import (
    NORMED,
    PAST_NORM,
    AddAndNormalize,
    BlockRMSNorm,
    FusedRMSNorm,
    add_rows_past_norm,
    rms_norm,
)
from megatron_magi.adapter.fused.residual import JoinedAddition, join_additions
from tests.adapter.fused.exactness import DTYPES, assert_as_good, results

WIDTH = 16


def normed(x, weight):
    return torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-5)


def block_norm(**more):
    config = SimpleNamespace(
        normalization="RMSNorm", layernorm_zero_centered_gamma=False, params_dtype=torch.float32,
        sequence_parallel=False, **more,
    )  # fmt: skip
    module = BlockRMSNorm(config, WIDTH).to(DEVICE)
    torch.nn.init.uniform_(module.weight, 0.5, 1.5)
    return module


def addends(*shape):
    x, residual = torch.randn(2, *shape, device=DEVICE)
    return x.requires_grad_(), residual.requires_grad_()


def add(module, x, residual, bias=None, prob=0.0, training=True):
    return JoinedAddition(module)(training, False)((x, bias), residual, prob)


@DTYPES
@pytest.mark.parametrize("shape", [(7, 1, 64), (4, 2, 100), (3, 1, 2048)])
def test_one_kernel_has_the_bits_of_two(dtype, shape):
    torch.manual_seed(shape[-1])
    x, residual = torch.randn(2, *shape, device=DEVICE).to(dtype)
    weight = torch.rand(shape[-1], device=DEVICE).to(dtype)
    total, out = AddAndNormalize.apply(x, residual, weight, 1e-5, False)
    if dtype == torch.float32 or DEVICE == "cuda":  # Triton's interpreter does not round bf16
        assert torch.equal(total, residual + x)
    assert torch.equal(out, rms_norm(total, weight, 1e-5))


@DTYPES
@pytest.mark.parametrize("shape", [(7, 1, 64), (4, 2, 100)])
def test_sum_norm_and_their_gradients(dtype, shape):
    torch.manual_seed(shape[-1])
    inputs = [*torch.randn(2, *shape, device=DEVICE).to(dtype)]
    inputs.append((1 + 0.3 * torch.randn(shape[-1], device=DEVICE)).to(dtype))
    grad = torch.randn(2, *shape, device=DEVICE).to(dtype)

    def fused(x, residual, weight):
        return torch.stack(AddAndNormalize.apply(x, residual, weight, 1e-5, False))

    def plain(x, residual, weight):
        total = residual + x
        return torch.stack((total, normed(total, weight)))

    got, same = (results(way, *inputs, grad=grad) for way in (fused, plain))
    exact = results(plain, *(t.double() for t in inputs), grad=grad)
    assert_as_good(got, same, exact, dtype)


def test_the_norm_takes_what_the_addition_left(monkeypatch):
    module, (x, residual) = block_norm(), addends(5, 1, WIDTH)
    leaves = (x, residual, module.weight)
    want = residual + x
    goal = (want + normed(want, module.weight).tanh()).square().sum()
    want = torch.autograd.grad(goal, leaves)
    monkeypatch.setattr(norms, "rms_norm_and_rows", None)  # the norm itself computes nothing
    total = add(module, x, residual)
    out = module(total)
    assert not vars(total), "taken once"
    got = torch.autograd.grad((total + out.tanh()).square().sum(), leaves)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_sum_and_norm_is_enough(used):
    module, (x, residual) = block_norm(), addends(5, 1, WIDTH)
    leaves = (x, residual, module.weight)
    total = add(module, x, residual)
    goal = (total, module(total))[used].sin().sum()
    got = torch.autograd.grad(goal, leaves, allow_unused=True)
    plain = residual + x
    goal = (plain, normed(plain, module.weight))[used].sin().sum()
    want = torch.autograd.grad(goal, leaves, allow_unused=True)
    torch.testing.assert_close(got, want)


def change_rows(total, module):
    with torch.no_grad():
        total.add_(1)


def change_weight(total, module):
    with torch.no_grad():
        module.weight.mul_(2)


@pytest.mark.parametrize("change", [change_rows, change_weight])
def test_rows_that_were_changed_since_are_normalised_again(change):
    module, (x, residual) = block_norm(), addends(5, 1, WIDTH)
    total = add(module, x, residual)
    change(total, module)
    torch.testing.assert_close(module(total), normed(total, module.weight))


def test_another_norm_and_another_tensor_do_not_take_the_rows():
    module, other = block_norm(), block_norm()
    total = add(module, *addends(5, 1, WIDTH))
    torch.testing.assert_close(other(total), normed(total, other.weight))
    total = add(module, *addends(5, 1, WIDTH))
    twice = total * 2
    torch.testing.assert_close(module(twice), normed(twice, module.weight))


def test_without_gradients_rows_with_a_graph_are_not_taken():
    """As in the first pass of a recomputed norm, whose second pass has other rows."""
    module = block_norm()
    total = add(module, *addends(5, 1, WIDTH))
    with torch.no_grad():
        out = module(total)
    assert not out.requires_grad and not vars(total)


def test_a_norm_that_torchs_checkpoint_computes_again_computes_at_first():
    """Its second pass has no rows to take; it would save other tensors under the same numbers."""
    from torch.utils.checkpoint import checkpoint

    def way(total):
        return checkpoint(lambda rows: module(rows).sin(), total, use_reentrant=False)

    module, (x, residual) = block_norm(), addends(5, 1, WIDTH)
    leaves = (x, residual, module.weight)
    got = torch.autograd.grad(way(add(module, x, residual)).sum(), leaves)
    want = torch.autograd.grad(normed(residual + x, module.weight).sin().sum(), leaves)
    torch.testing.assert_close(got, want)


def test_within_torchs_checkpoint_the_norm_takes_the_rows(monkeypatch):
    from torch.utils.checkpoint import checkpoint

    module, (x, residual) = block_norm(), addends(5, 1, WIDTH)
    leaves = (x, residual, module.weight)
    want = torch.autograd.grad(normed(residual + x, module.weight).sin().sum(), leaves)
    monkeypatch.setattr(norms, "rms_norm_and_rows", None)  # the norm itself computes nothing

    def way(x, residual):
        return module(add(module, x, residual)).sin()

    got = torch.autograd.grad(checkpoint(way, x, residual, use_reentrant=False).sum(), leaves)
    torch.testing.assert_close(got, want)


def test_the_rows_that_went_past_a_norm_get_their_gradient():
    """The first addition of a decoder: the norm before its sublayer was not computed early."""
    first, second = block_norm(), block_norm()
    x = torch.randn(5, 1, WIDTH, device=DEVICE, requires_grad=True)
    leaves = (x, first.weight, second.weight)
    hidden = x * 1
    total = add(second, first(hidden).tanh(), hidden)
    assert PAST_NORM not in vars(hidden)
    got = torch.autograd.grad((total * second(total)).sum(), leaves)
    total = x + normed(x, first.weight).tanh()
    want = torch.autograd.grad((total * normed(total, second.weight)).sum(), leaves)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("made_there", [True, False])
def test_inference_mode_adds_and_normalises_one_after_the_other(made_there):
    """Its tensors do not count their changes in place."""
    with torch.inference_mode(made_there):
        module = block_norm()
    with torch.inference_mode(not made_there), torch.no_grad():
        x, residual = torch.randn(2, 5, 1, WIDTH, device=DEVICE)
        total = add(module, x.clone(), residual, training=False)
        total += 1
        out = module(total)
        torch.testing.assert_close(out, normed(residual + x + 1, module.weight))


def hook(*_):
    return None


@pytest.mark.parametrize(
    "case",
    ["bias", "dropout", "dtype", "strided", "pre-hook", "hook", "backward hook", "global hook"],
)
def test_megatrons_addition_stays_for_what_is_not_only_a_sum(case, monkeypatch):
    """A norm with a hook may get its weight there, as under overlap_param_gather."""
    module, (x, residual) = block_norm(), addends(5, 2, WIDTH)
    bias, handle = None, None
    if case == "bias":
        bias = torch.randn(WIDTH, device=DEVICE)
    elif case == "dtype":
        residual = residual.detach().double().requires_grad_()
    elif case == "strided":
        residual = residual.transpose(0, 1).contiguous().transpose(0, 1)
    elif case == "global hook":
        handle = torch.nn.modules.module.register_module_forward_pre_hook(hook)
    elif "hook" in case:
        register = {
            "pre-hook": module.register_forward_pre_hook,
            "hook": module.register_forward_hook,
            "backward hook": module.register_full_backward_hook,
        }
        handle = register[case](hook)
    prob = 0.5 if case == "dropout" else 0.0
    total = add(module, x, residual, bias, prob)
    assert NORMED not in vars(total)
    if case != "dropout":
        want = residual.to(x.dtype) + (x if bias is None else x + bias)
        # Megatron 0.16 adds in the dtype of x, later ones in that of the residual.
        torch.testing.assert_close(total.to(x.dtype), want)
    if handle is not None:
        handle.remove()
    if case in ("dropout", "global hook") or "hook" in case:
        again = add(module, x, residual, training=case != "dropout", prob=prob)
        assert NORMED in vars(again), "dropout is for training, and the hook is gone"


def test_the_weights_gradient_is_added_in_fp32_where_megatron_accumulates():
    module, (x, residual) = block_norm(gradient_accumulation_fusion=True), addends(5, 1, WIDTH)
    weight = module.weight
    (want,) = torch.autograd.grad(normed(residual + x, weight).sin().sum(), weight)
    weight.main_grad = torch.full((WIDTH,), 3.0, device=DEVICE)
    weight.grad_added_to_main_grad = False
    module(add(module, x, residual)).sin().sum().backward()
    assert weight.grad_added_to_main_grad and weight.grad.shape == weight.shape
    torch.testing.assert_close(weight.main_grad, want + 3)
    module(x * 1 + residual).sin().sum().backward()
    torch.testing.assert_close(weight.main_grad, 2 * want + 3)
    del weight.main_grad  # a model without Megatron's wrapper
    weight.grad = None
    module(add(module, x, residual)).sin().sum().backward()
    torch.testing.assert_close(weight.grad, want)


@pytest.mark.parametrize("joined", [True, False])
def test_a_weight_that_is_frozen_after_it_was_wrapped_gets_no_gradient(joined):
    """Its main_grad stays there, and the optimizer would still read it."""
    module, (x, residual) = block_norm(gradient_accumulation_fusion=True), addends(5, 1, WIDTH)
    module.weight.main_grad = torch.zeros(WIDTH, device=DEVICE)
    module.weight.grad_added_to_main_grad = False
    module.weight.requires_grad_(False)
    total = add(module, x, residual) if joined else x + residual
    module(total).sin().sum().backward()
    assert x.grad.any() and not module.weight.main_grad.any()
    assert not module.weight.grad_added_to_main_grad


def fake_model(layers=3, final=True, **config):
    from megatron.core.transformer.identity_op import IdentityOp

    fields = {"recompute_granularity": None, "recompute_modules": None, **config}

    def layer():
        return SimpleNamespace(
            input_layernorm=block_norm(), pre_mlp_layernorm=block_norm(),
            self_attn_bda=add_rows_past_norm, mlp_bda=add_rows_past_norm,
            cross_attention=IdentityOp(),
        )  # fmt: skip

    decoder = SimpleNamespace(layers=[layer() for _ in range(layers)])
    if final:
        decoder.final_layernorm = FusedRMSNorm.__new__(FusedRMSNorm)
    return SimpleNamespace(decoder=decoder, config=SimpleNamespace(**fields))


def test_every_addition_is_joined_with_the_norm_behind_it():
    model = fake_model()
    assert join_additions(model) == 6
    layers = model.decoder.layers
    for here, after in pairwise(layers):
        assert here.self_attn_bda.norm is here.pre_mlp_layernorm
        assert here.mlp_bda.norm is after.input_layernorm
    assert layers[-1].mlp_bda.norm is model.decoder.final_layernorm
    assert join_additions(model) == 0, "once"


def test_what_is_not_followed_by_its_norm_is_not_joined():
    assert join_additions(SimpleNamespace(config=None)) == 0, "a stage without a decoder"
    assert join_additions(fake_model(final=False)) == 5, "the stage's output"
    assert join_additions(fake_model(recompute_granularity="full")) == 3, "within a layer"
    selective = {"recompute_granularity": "selective"}
    assert join_additions(fake_model(recompute_modules=["core_attn"], **selective)) == 6
    assert join_additions(fake_model(recompute_modules=["layernorm"], **selective)) == 0
    assert join_additions(fake_model(cpu_offloading=True)) == 0
    model = fake_model()
    model.decoder.layers[0].cross_attention = torch.nn.Identity()
    model.decoder.layers[1].mlp_bda = hook
    model.decoder.layers[2].pre_mlp_layernorm = torch.nn.Identity()
    assert join_additions(model) == 3
    model = fake_model()
    model.decoder.layers[1] = SimpleNamespace()  # as Mamba's layers, which have other names
    assert join_additions(model) == 3
