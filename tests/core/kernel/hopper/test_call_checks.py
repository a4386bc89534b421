"""What the Hopper kernels demand of a call, checked before anything is launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_magi import masks
from megatron_magi.core.kernel.backend import AttnCall, GradCall
from megatron_magi.core.kernel.hopper import call_checks
from megatron_magi.core.kernel.slice_table import SliceTable

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TABLE = SliceTable(masks.causal(4).slices, 4, 4)


def call_of(dtype: torch.dtype = BF16, scale: float = 0.1, rows: int = 4) -> AttnCall:
    """Two query heads on one key head; values are narrower than keys."""
    q, k, v = (torch.zeros(rows, heads, width, dtype=dtype)
               for heads, width in ((2, 192), (1, 192), (1, 128)))  # fmt: skip
    return AttnCall(q, k, v, TABLE, scale)


def grad_of(**changes: Any) -> GradCall:
    lse = torch.zeros(4, 2)
    return GradCall(torch.zeros(4, 2, 128, dtype=BF16), lse, lse.clone())._replace(**changes)


@pytest.mark.parametrize("capability", [(8, 0), (9, 1), (10, 0)])
def test_only_hopper_runs_them(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    text = rf"capability 9\.0\), got {capability[0]}\.{capability[1]} on cuda:1; use the backend"
    with pytest.raises(NotImplementedError, match=text):
        call_checks.check_device(gpu, BF16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for dtype in (BF16, FP16):
        call_checks.check_device(gpu, dtype)
    with pytest.raises(NotImplementedError, match=r"take bf16 and fp16, got torch\.float32"):
        call_checks.check_device(gpu, FP32)


@pytest.mark.parametrize("softcap", [9e-7, 1.1e6])
def test_a_softcap_beyond_the_range_of_fp32_is_refused(softcap: float) -> None:
    for fits in (0.0, 1e-6, 50.0, 1e6):
        call_checks.check_call(call_of()._replace(softcap=fits))
    with pytest.raises(ValueError, match=r"softcap must be 0.0 or between 1e-06 and .*; leave it"):
        call_checks.check_call(call_of()._replace(softcap=softcap))


@pytest.mark.parametrize("widths", [(320, 320), (257, 256), (64, 264)], ids=str)
def test_a_call_with_wider_heads_is_refused(widths: tuple[int, int]) -> None:
    q, v = (torch.zeros(4, 2, width, dtype=torch.bfloat16) for width in widths)
    call = AttnCall(q, q, v, SliceTable(masks.causal(4).slices, 4, 4), 0.1)
    text = rf"up to 256 and values up to 256, got {widths[0]} and {widths[1]}; use the backend"
    with pytest.raises(NotImplementedError, match=text):
        call_checks.widths_for(call)


def test_narrow_heads_get_the_least_widths_that_hold_them() -> None:
    q, v = torch.zeros(4, 2, 24), torch.zeros(4, 2, 16)
    assert call_checks.widths_for(AttnCall(q, q, v, TABLE, 0.1)) == (64, 64)
    wide = torch.zeros(4, 2, 80)
    assert call_checks.widths_for(AttnCall(wide, wide, v, TABLE, 0.1)) == (96, 96)


@pytest.mark.parametrize(
    "call, error, text",
    [
        (call_of(FP32), TypeError, "take bf16 and fp16, got torch.float32; cast q, k and v"),
        (call_of(rows=5), ValueError, "slices were made for, 4 and 4, got 5 and 5"),
        (call_of(scale=0.0), ValueError, "at least 1e-30 in torch.bfloat16 and finite, got 0.0"),
        (call_of(scale=float("nan")), ValueError, "and finite, got nan"),
        (call_of(scale=float("inf")), ValueError, "and finite, got inf"),
        (call_of(FP16, 1e-7), ValueError, "at least 1e-06 in torch.float16 and finite, got 1e-07"),
    ],
    ids=["dtype", "rows", "zero", "nan", "inf", "small for fp16"],
)
def test_a_bad_call_is_refused(call: AttnCall, error: type[Exception], text: str) -> None:
    call_checks.check_call(call_of())
    call_checks.check_call(call_of(scale=1e-7))
    with pytest.raises(error, match=text):
        call_checks.check_call(call)


def result(
    out: torch.dtype = FP32, lse: torch.dtype = FP32, width: int = 128
) -> tuple[Tensor, Tensor]:
    return torch.zeros(4, 2, width, dtype=out), torch.zeros(4, 2, dtype=lse)


def test_outputs_are_in_the_dtype_of_q_or_in_fp32() -> None:
    for dtype in (None, BF16, FP32):
        call_checks.check_output(call_of(), None, None, dtype)
    with pytest.raises(
        TypeError, match=r"out_dtype must be torch\.bfloat16 or torch\.float32, got"
    ):
        call_checks.check_output(call_of(), None, None, FP16)


def test_an_earlier_result_is_continued_in_fp32_alone() -> None:
    """Where it is only filled in, its dtype may be that of q."""
    call_checks.check_output(call_of(), result(), None, None)
    call_checks.check_output(call_of(), None, result(BF16), None)
    with pytest.raises(TypeError, match=r"must be fp32 to continue from, got out torch\.bfloat16"):
        call_checks.check_output(call_of(), result(BF16), None, None)


@pytest.mark.parametrize(
    "given, error, text",
    [
        (result(FP16), TypeError, "fp32 and lse in fp32, got torch.float16 and torch.float32"),
        (result(lse=BF16), TypeError, "got torch.float32 and torch.bfloat16"),
        (result(width=192), ValueError, r"out \[4, 2, 128\] .* got \[4, 2, 192\] with strides"),
        ((result()[0].mT.contiguous().mT, result()[1]), ValueError, r"strides \[256, 1, 2\]"),
        ((result()[0], torch.zeros(4, 1)), ValueError, r"lse \[4, 2\], got .* and \[4, 1\]"),
    ],
    ids=["out", "lse", "width", "strides", "heads"],
)
def test_another_earlier_result_is_refused(
    given: tuple[Tensor, Tensor], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        call_checks.check_output(call_of(), None, given, None)


def pair(rows: int = 4, dtype: torch.dtype = FP32) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, 1, 192, dtype=dtype), torch.zeros(rows, 1, 128, dtype=dtype)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": BF16, "dkv": pair(dtype=BF16)},
        {"dkv": torch.zeros(4, 1, 320).split((192, 128), -1), "dq": torch.zeros(4, 2, 192)},
        {"delta": None, "out": torch.zeros(4, 2, 128, dtype=BF16)},
    ],
    ids=["new", "in the dtype of q", "side by side", "delta left to the kernel"],
)
def test_good_gradients_pass(changes: dict[str, Any]) -> None:
    call_checks.check_gradients(call_of(), grad_of(**changes))


@pytest.mark.parametrize(
    "changes, error, text",
    [
        ({"dtype": FP16}, TypeError, r"gradients must be torch\.bfloat16 or torch\.float32, got"),
        ({"delta": None}, ValueError, "either delta or out is required"),
        ({"out": torch.zeros(4, 2, 128, dtype=BF16)}, ValueError, "either delta or out is requi"),
        ({"dout": torch.zeros(4, 2, 128)}, TypeError, r"dout must .* torch\.float32"),
        ({"dout": torch.zeros(4, 2, 192, dtype=BF16)}, TypeError, r"dout must .* \[4, 2, 192\]"),
        ({"lse": torch.zeros(4, 2, dtype=BF16)}, TypeError, r"lse must be fp32 \[4, 2\], got"),
        ({"delta": torch.zeros(4, 1)}, TypeError, r"delta must be fp32 .* \[4, 1\]; pass"),
        ({"dq": torch.zeros(4, 2, 192, dtype=BF16)}, ValueError, "dq must be written to"),
        ({"dkv": pair(3)}, ValueError, r"dk .* \[4, 1, 192\] with 16-byte"),
        ({"dkv": pair(dtype=BF16)}, ValueError, r"dk must be written to torch\.float32"),
        ({"dkv": (pair()[0], torch.zeros(4, 1, 130)[..., 1:129])}, ValueError, "dv must be"),
        ({"dkv": (torch.zeros(4, 1, 194)[..., :192], pair()[1])}, ValueError, "dk must be"),
    ],
    ids=["dtype", "neither", "both", "dout's dtype", "dout's width", "lse", "delta", "dq",
         "rows of dk", "dtype of dk", "base of dv", "stride of dk"],
)  # fmt: skip
def test_bad_gradients_are_refused(
    changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        call_checks.check_gradients(call_of(), grad_of(**changes))
