"""The C structs that are passed to the CUDA library, and a check that both sides agree on them."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from ctypes import Structure, c_float, c_int32, c_int64, c_uint32, c_void_p
from typing import Any

import torch
from torch import Tensor

ABI_VERSION = 17
DTYPE_CODES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
MAX_ROW_PARTS = 2
"""Number of tensors whose rows one call may move: keys and values."""


class CudaKernelError(RuntimeError):
    """A kernel could not be launched; the message says which and why."""


class TensorView(Structure):
    """A strided [tokens, heads, head_dim] tensor on the device."""

    _fields_ = [("data", c_void_p), ("stride_token", c_int64), ("stride_head", c_int64)]

    @classmethod
    def of(cls, x: Tensor) -> TensorView:
        token, head, _ = x.stride()
        return cls(x.data_ptr(), token, head)


def _fields(kind: Any, *names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, kind) for name in names)


class ParamTemplate:
    """A struct of which a few fields differ from call to call, as bytes that are made in one step.
    Copying a ctypes struct and assigning its fields takes several times as long."""

    def __init__(self, params: Structure, names: Sequence[str]) -> None:
        """``names`` are those fields, in the order of the struct: "lse", "q.data", "own.1.data"."""
        whole, end, code = bytes(params), 0, "@"
        self.params = whole
        self.fields = [(at, kind._type_) for at, kind in (_place(type(params), n) for n in names)]
        """Offset and kind of those fields; the kinds are letters of the module struct."""
        self._parts: list[Any] = []
        for name in names:
            begin, kind = _place(type(params), name)
            code += f"{begin - end}s{kind._type_}"
            self._parts += [whole[end:begin], None]
            end = begin + ctypes.sizeof(kind)
        self._parts.append(whole[end:])
        self._pack = struct.Struct(f"{code}{len(whole) - end}s").pack

    def filled(self, *values: int | float) -> bytes:
        """The struct with these values in the named fields."""
        parts = self._parts.copy()
        parts[1::2] = values
        return self._pack(*parts)


def _place(kind: Any, name: str) -> tuple[int, Any]:
    """The offset of a field in a struct, and its ctype; dots lead into structs and arrays in it."""
    offset = 0
    for part in name.split("."):
        if part.isdigit():
            kind = kind._type_
            offset += int(part) * ctypes.sizeof(kind)
        else:
            offset += getattr(kind, part).offset
            kind = dict(kind._fields_)[part]
    return offset, kind


class FwdParams(Structure):
    """MagiFwdParams: one launch of the forward."""

    _fields_ = [
        *_fields(TensorView, "q", "k", "v", "out"),
        *_fields(c_void_p, "lse"),
        *_fields(c_int64, "lse_stride_token", "lse_stride_head"),
        *_fields(c_void_p, "sink_lse"),
        *_fields(c_int64, "sink_stride_token"),
        *_fields(c_void_p, "tiles", "entries", "empty_rows", "max_logits", "counter", "stream"),
        *_fields(c_int32, "num_q", "num_k", "num_heads_q", "num_heads_kv"),
        *_fields(c_int32, "head_dim", "value_dim"),
        *_fields(c_int32, "dtype", "out_dtype", "merge", "num_tiles"),
        *_fields(c_float, "softcap"),
        *_fields(c_int32, "num_empty_ranges", "heads_per_section", "pack", "block_m", "block_n"),
        *_fields(c_int32, "num_sms"),
        *_fields(c_float, "softmax_scale"),
    ]


class BwdParams(Structure):
    """MagiBwdParams: one launch of the backward."""

    _fields_ = [
        *_fields(TensorView, "q", "k", "v", "dout", "out", "dq_acc", "dq", "dk", "dv"),
        *_fields(c_void_p, "lse", "delta"),
        *_fields(c_int64, "lse_stride_token", "lse_stride_head"),
        *_fields(c_int64, "delta_stride_token", "delta_stride_head"),
        *_fields(c_void_p, "stats", "partial", "items", "entries"),
        *_fields(c_void_p, "places", "turns", "segments", "semaphores", "stream"),
        *_fields(c_int32, "num_q", "num_k", "num_heads_q", "num_heads_kv"),
        *_fields(c_int32, "head_dim", "value_dim"),
        *_fields(c_int32, "dtype", "grad_dtype", "num_items", "num_tiles", "num_splits"),
        *_fields(c_int32, "lanes_per_section", "in_turns", "whole_heads"),
        *_fields(
            c_int32, "clear_dq", "deterministic", "num_row_groups", "heads_inner", "descending"
        ),
        *_fields(c_float, "softmax_scale", "softcap"),
    ]


class DeltaParams(Structure):
    """MagiDeltaParams: row sums of out * dout."""

    _fields_ = [
        *_fields(TensorView, "out", "dout"),
        *_fields(c_void_p, "delta", "stream"),
        *_fields(c_int32, "num_tokens", "num_heads", "value_dim", "dtype"),
    ]


class SinkParams(Structure):
    """MagiSinkParams: the gradient of sinks."""

    _fields_ = [
        *_fields(c_void_p, "sink_lse", "lse", "delta", "grad", "stream"),
        *_fields(c_int32, "num_tokens", "num_heads", "num_blocks", "per_token"),
    ]


class Rows(Structure):
    """MagiRows: rows of one tensor, a number of bytes apart."""

    _fields_ = [("data", c_void_p), ("stride", c_int64)]


class GatherParams(Structure):
    """MagiGatherParams: copies rows to other places."""

    _fields_ = [
        *_fields(Rows * MAX_ROW_PARTS, "src", "dst"),
        *_fields(c_void_p, "index", "stream"),
        *_fields(c_int64, "num_rows"),
        *_fields(c_int32, "row_bytes", "num_parts"),
    ]


class AddParams(Structure):
    """MagiAddParams: adds received rows to own ones."""

    _fields_ = [
        *_fields(Rows * MAX_ROW_PARTS, "own", "received", "dst"),
        *_fields(c_void_p, "begin", "sources", "stream"),
        *_fields(c_int64, "num_rows"),
        *_fields(c_int32, "width", "num_parts", "received_dtype", "dst_dtype"),
    ]


class PeerFlags(Structure):
    """MagiPeerFlags: addresses of the numbers that two ranks tell each other."""

    _fields_ = [*_fields(c_void_p, "ready_there", "ready_here", "taken_there", "taken_here")]


class Pull(Structure):
    """MagiPull: rows that are read from one peer."""

    _fields_ = [*_fields(c_void_p, "source", "target"), *_fields(c_int64, "bytes")]


class ExchangeParams(Structure):
    """MagiExchangeParams: one exchange by the copy engine."""

    _fields_ = [
        *_fields(c_void_p, "flags", "pulls", "current", "beside", "filled", "arrived"),
        *_fields(c_uint32, "number"),
        *_fields(c_int32, "num_peers"),
    ]


class ClaimParams(Structure):
    """MagiClaimParams: waits until peers have read an exchange's rows."""

    _fields_ = [
        *_fields(c_void_p, "flags", "stream"),
        *_fields(c_uint32, "number"),
        *_fields(c_int32, "num_peers"),
    ]


class SendParams(Structure):
    """MagiSendParams: claims a slot, gathers rows into it and begins their exchange."""

    _fields_ = [("claim", ClaimParams), ("gather", GatherParams), ("exchange", ExchangeParams)]


SIZES = {
    "fwd": ctypes.sizeof(FwdParams),
    "bwd": ctypes.sizeof(BwdParams),
    "delta": ctypes.sizeof(DeltaParams),
    "sink": ctypes.sizeof(SinkParams),
    "row": ctypes.sizeof(GatherParams) + ctypes.sizeof(AddParams),
    "exchange": sum(map(ctypes.sizeof, (ExchangeParams, ClaimParams, PeerFlags, Pull, SendParams))),
}
"""Bytes of the structs, by the names under which the library reports its own sizes."""


def check_abi(handle: Any, path: Any) -> None:
    """Compare version and struct sizes with the loaded library's.

    Raises:
        CudaKernelError: the library was built from other sources.
    """
    got = {name: getattr(handle, f"magi_{name}_params_bytes")() for name in SIZES}
    version = handle.magi_abi_version()
    if version != ABI_VERSION or got != SIZES:
        raise CudaKernelError(
            f"the CUDA library must have ABI {ABI_VERSION} with parameters of {SIZES} bytes, got "
            f"{version} with {got} from {path}; rebuild with python -m megatron_magi.build --force"
        )
