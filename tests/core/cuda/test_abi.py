"""Structs of the C ABI have the fields of the headers, and describe the tensors they are given."""

from __future__ import annotations

import ctypes
import re
from ctypes import Structure, c_float, c_int32, c_int64, c_uint32, c_void_p
from functools import reduce
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_magi.build import SOURCE_DIR
from megatron_magi.core.cuda import abi
from megatron_magi.core.cuda.abi import CudaKernelError, ParamTemplate, Rows, TensorView

STRUCTS = {
    "MagiTensor": (TensorView, "params.h"),
    "MagiFwdParams": (abi.FwdParams, "params.h"),
    "MagiBwdParams": (abi.BwdParams, "backward/params.h"),
    "MagiDeltaParams": (abi.DeltaParams, "backward/params.h"),
    "MagiSinkParams": (abi.SinkParams, "sink/params.h"),
    "MagiRows": (Rows, "rows/params.h"),
    "MagiGatherParams": (abi.GatherParams, "rows/params.h"),
    "MagiAddParams": (abi.AddParams, "rows/params.h"),
    "MagiPeerFlags": (abi.PeerFlags, "rows/params.h"),
    "MagiPull": (abi.Pull, "rows/params.h"),
    "MagiExchangeParams": (abi.ExchangeParams, "rows/params.h"),
    "MagiClaimParams": (abi.ClaimParams, "rows/params.h"),
    "MagiSendParams": (abi.SendParams, "rows/params.h"),
}
KINDS = {
    "int32_t": c_int32,
    "uint32_t": c_uint32,
    "int64_t": c_int64,
    "float": c_float,
    "MagiTensor": TensorView,
    "MagiRows": Rows,
    "MagiGatherParams": abi.GatherParams,
    "MagiExchangeParams": abi.ExchangeParams,
    "MagiClaimParams": abi.ClaimParams,
}


def header(name: str) -> str:
    """Its code, without comments."""
    return re.sub(r"//.*", "", (SOURCE_DIR / name).read_text())


def number(name: str) -> int:
    """The value of a constant of the sources."""
    sources = [*SOURCE_DIR.rglob("*.h"), *SOURCE_DIR.rglob("*.cpp")]
    text = "".join(path.read_text() for path in sources)
    (value,) = set(re.findall(rf"\b{name} = (\d+)[,; ]", text))
    return int(value)


def declared(struct: str, code: str) -> list[tuple[str, Any]]:
    """Names and ctypes of a struct's fields, in the header's order."""
    body = re.search(rf"struct {struct} \{{(.*?)\n\}};", code, re.S)
    assert body is not None, struct
    fields = []
    for declaration in filter(None, map(str.strip, body[1].split(";"))):
        kind, names = re.fullmatch(r"(?:const )?(\w+\*?) (.*)", declaration, re.S).groups()  # type: ignore[union-attr]
        for name in names.split(","):
            bare, _, parts = name.strip().rstrip("]").partition("[")
            one = c_void_p if kind.endswith("*") else KINDS[kind]
            fields.append((bare, one * number(parts) if parts else one))
    return fields


@pytest.mark.parametrize("name", STRUCTS)
def test_a_struct_has_the_fields_of_its_header(name: str) -> None:
    """Names, types and order; equal sizes alone would let two pointers change places."""
    mirror, where = STRUCTS[name]
    assert declared(name, header(where)) == [*mirror._fields_]


def test_every_struct_of_the_headers_is_mirrored() -> None:
    headers = {path.relative_to(SOURCE_DIR).as_posix() for path in SOURCE_DIR.rglob("params.h")}
    assert headers == {where for _, where in STRUCTS.values()}
    named = [name for where in headers for name in re.findall(r"struct (\w+) \{", header(where))]
    assert sorted(named) == sorted(STRUCTS)


def test_constants_are_those_of_the_sources() -> None:
    assert number("kAbiVersion") == abi.ABI_VERSION
    assert number("kMagiMaxRowParts") == abi.MAX_ROW_PARTS
    codes = [number(name) for name in ("kMagiBf16", "kMagiFp16", "kMagiFp32")]
    kinds = (torch.bfloat16, torch.float16, torch.float32)
    assert dict(zip(kinds, codes, strict=True)) == abi.DTYPE_CODES


def test_a_view_is_where_the_tensor_begins_and_its_strides() -> None:
    wide = torch.zeros(10, 2, 6, 8, dtype=torch.bfloat16)
    x = wide[3:, 1, 2:4]
    view = TensorView.of(x)
    assert view.data == wide.data_ptr() + 2 * (3 * 96 + 48 + 2 * 8)
    assert (view.stride_token, view.stride_head) == (96, 8)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_pattern_makes_the_struct_with_its_fields_assigned(direction: str) -> None:
    """Of every field that a launch fills in, each with a value of its own."""
    names = import_module(f"megatron_magi.core.kernel.hopper.{direction}").PATCHED_FIELDS
    kind = {"forward": abi.FwdParams, "backward": abi.BwdParams}[direction]
    params = kind.from_buffer_copy(bytes(i % 251 for i in range(ctypes.sizeof(kind))))
    pattern = ParamTemplate(params, names)
    for first in (1, 2**30):
        values = range(first, first + len(names))
        for name, value in zip(names, values, strict=True):
            *outer, last = name.split(".")
            setattr(reduce(getattr, outer, params), last, value)
        assert pattern.filled(*values) == bytes(params)


def test_a_pattern_with_parts_of_arrays() -> None:
    params = abi.AddParams(num_rows=5)
    params.dst[1].stride = 9
    names = ["own.0.data", "own.1.data", "dst.1.data", "begin"]
    made = abi.AddParams.from_buffer_copy(ParamTemplate(params, names).filled(1, 2, 3, 4))
    assert [rows.data for rows in made.own] == [1, 2] and made.received[0].data is None
    assert (made.dst[0].data, made.dst[1].data, made.dst[1].stride) == (None, 3, 9)
    assert (made.begin, made.num_rows) == (4, 5)


def test_a_pattern_of_numbers() -> None:
    made = ParamTemplate(abi.FwdParams(num_q=5), ["dtype", "softcap", "softmax_scale"]).filled(
        1, 0.5, -2
    )
    params = abi.FwdParams.from_buffer_copy(made)
    assert (params.num_q, params.dtype, params.softcap, params.softmax_scale) == (5, 1, 0.5, -2.0)


def library(**other: int) -> SimpleNamespace:
    """What `check_abi` asks a library, answered as these sources would."""
    sizes = {f"magi_{name}_params_bytes": size for name, size in abi.SIZES.items()}
    answers = {"magi_abi_version": abi.ABI_VERSION, **sizes, **other}
    return SimpleNamespace(**{name: lambda value=value: value for name, value in answers.items()})


def test_a_library_of_these_sources_is_taken() -> None:
    abi.check_abi(library(), "here")


@pytest.mark.parametrize(
    "name", ["magi_abi_version", *(f"magi_{n}_params_bytes" for n in abi.SIZES)]
)
def test_a_library_of_other_sources_is_refused(name: str) -> None:
    with pytest.raises(CudaKernelError, match="from here; rebuild with python -m") as refused:
        abi.check_abi(library(**{name: 1000}), "here")
    assert f"must have ABI {abi.ABI_VERSION}" in str(refused.value) and "1000" in str(refused.value)


def test_every_struct_that_is_passed_is_compared() -> None:
    """A library reports the rows' two structs as one size."""
    passed = [s for s, _ in STRUCTS.values() if s not in (TensorView, Rows)]
    assert all(issubclass(struct, Structure) for struct in passed)
    assert sum(map(ctypes.sizeof, passed)) == sum(abi.SIZES.values())
