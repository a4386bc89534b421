"""Checks of tensors, devices and fill values: what passes comes back in its plain form."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import megatron_magi as magi
from megatron_magi.core.tensor_checks import device, fill, on_host
from tests.process_pool import pool


def test_values_come_to_the_host_from_where_there_are_some() -> None:
    x = torch.ones(2, requires_grad=True)
    assert torch.equal(on_host(x, "x"), torch.ones(2)) and not on_host(x, "x").requires_grad
    for bad in (torch.zeros(2, device="meta"), torch.zeros(2).to_sparse()):
        with pytest.raises(TypeError, match=r"^x must be a dense tensor with values, got .*; make"):
            on_host(bad, "x")


@pytest.mark.parametrize("given", ["cpu", torch.device("cpu")], ids=type)
def test_a_device_comes_back_as_one(given: str | torch.device) -> None:
    made = device(given)
    assert isinstance(made, torch.device) and made == torch.device("cpu")


def test_a_device_must_be_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("cuda", "cuda:0", "cuda:1"):
        assert device(name) == torch.device(name)
    with pytest.raises(ValueError, match=r"of this machine, got 'cuda:2' with 2 GPUs; pass 'cpu'"):
        device("cuda:2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device("cuda").index is None, "whichever is the current one"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name in ("cuda", "cuda:0"):
        with pytest.raises(ValueError, match=f"got '{name}' with 0 GPUs"):
            device(name)
    assert device("meta").type == "meta", "only GPUs are counted"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_tensors_with_fractions_take_every_number(dtype: torch.dtype) -> None:
    x = torch.zeros(2, dtype=dtype)
    assert fill(-1.5, x, "pad_value") == -1.5 and fill(math.inf, x, "pad_value") == math.inf
    assert math.isnan(fill(math.nan, x, "pad_value"))
    whole = fill(np.int64(3), x, "pad_value")
    assert whole == 3.0 and type(whole) is float
    with pytest.raises(TypeError, match="pad_value must be a number, got True"):
        fill(True, x, "pad_value")


@pytest.mark.parametrize(
    "dtype, low, high",
    [
        (torch.uint8, 0, 255),
        (torch.int8, -128, 127),
        (torch.int32, -(2**31), 2**31 - 1),
        (torch.int64, -(2**63), 2**63 - 1),
    ],
    ids=str,
)
def test_integers_are_filled_with_what_they_hold(dtype: torch.dtype, low: int, high: int) -> None:
    x = torch.zeros(2, dtype=dtype)
    for value in (low, high):
        assert fill(value, x, "pad_value") == value
        assert torch.full_like(x, fill(value, x, "pad_value")).tolist() == [value] * 2
    for value in (low - 1, high + 1):
        with pytest.raises(ValueError, match=f"pad_value for {dtype} must be between {low} and"):
            fill(value, x, "pad_value")


def test_a_whole_float_is_an_integer_and_no_other_is() -> None:
    """0.0 is the default for tensors of any dtype."""
    x = torch.zeros(2, dtype=torch.int64)
    made = fill(0.0, x, "pad_value")
    assert made == 0 and type(made) is int
    for bad in (0.5, math.nan, math.inf, True, "0"):
        with pytest.raises(TypeError, match=r"pad_value for torch\.int64 must be an integer"):
            fill(bad, x, "pad_value")


def test_truth_values_are_filled_with_0_and_1_of_any_spelling() -> None:
    x = torch.zeros(2, dtype=torch.bool)
    for value, wanted in ((0, False), (1, True), (0.0, False), (1.0, True), (np.True_, True)):
        assert fill(value, x, "pad_value") is wanted
    for bad in (2, -1, 0.5, "yes", None):
        with pytest.raises(TypeError, match="pad_value must be True or False"):
            fill(bad, x, "pad_value")


def refuses_dtensors(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    x = DTensor.from_local(torch.zeros(4, 1, 8), mesh, [Replicate()])
    plan = magi.plan(magi.masks.causal(4), mesh, magi.HeadShape(1, 1, 8))
    for call in (
        lambda: magi.dispatch(x, plan, mesh),
        lambda: magi.dist_attn(x, x, x, plan, mesh),
        lambda: magi.flex_flash_attn_func(x, x, x, slices=magi.masks.causal(4)),
    ):
        with pytest.raises(TypeError, match=r"must be a plain tensor, got a DTensor; pass x\.to_l"):
            call()


def test_a_dtensor_is_refused_on_every_rank() -> None:
    pool(2).run(refuses_dtensors)
