"""A prepared call gives a C function the struct that its pattern makes, and raises its message."""

from __future__ import annotations

import copy
import ctypes
import gc
import math
import sys
import threading
import weakref
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, Structure, c_char, c_float, c_int32, c_int64, c_uint32
from typing import Any

import pytest

from megatron_magi.core.cuda.abi import ParamTemplate
from megatron_magi.core.native import solver

Function = CFUNCTYPE(c_int32, ctypes.c_void_p, POINTER(c_char), c_int32)


class Params(Structure):
    _fields_ = [("place", ctypes.c_void_p), ("stride", c_int64), ("count", c_int32),
                ("number", c_uint32), ("scale", c_float), ("rest", c_int32)]  # fmt: skip


class Refused(RuntimeError):
    pass


def call_of(function: Any, pattern: ParamTemplate) -> Callable[..., None]:
    address = ctypes.cast(function, ctypes.c_void_p).value
    return solver.prepared_call("magi_any", address, pattern.params, pattern.fields, Refused)


@pytest.fixture
def seen() -> list[bytes]:
    return []


@pytest.fixture
def function(seen: list[bytes]) -> Any:
    @Function
    def made(params: int, message: Any, message_bytes: int) -> int:
        seen.append(ctypes.string_at(params, ctypes.sizeof(Params)))
        if Params.from_buffer_copy(seen[-1]).count == 76:
            return 2
        if Params.from_buffer_copy(seen[-1]).count == 77:
            ctypes.memmove(message, b"count is 77\0", 12)
            return 3
        return 0

    return made


NAMES = ["place", "stride", "count", "number", "scale"]
VALUES = (2**64 - 8, -(2**63), -(2**31), 2**32 - 1, 0.1)


@pytest.mark.parametrize("names", [NAMES, NAMES[1:4], ["scale"], []], ids=len)
def test_the_function_gets_what_the_pattern_makes(
    names: list[str], function: Any, seen: list[bytes]
) -> None:
    given = Params(5, 6, 7, 8, 9.5, 10)
    pattern = ParamTemplate(given, names)
    call = call_of(function, pattern)
    values = [value for name, value in zip(NAMES, VALUES, strict=True) if name in names]
    for some in (values, [1] * len(names), values):
        assert call(*some) is None
        assert seen[-1] == pattern.filled(*some)
    assert len(seen) == 3


def test_a_code_is_raised_with_the_message(function: Any) -> None:
    call = call_of(function, ParamTemplate(Params(), ["count"]))
    for _ in range(2):
        with pytest.raises(Refused, match="magi_any failed with code 3: count is 77"):
            call(77)
        with pytest.raises(Refused, match=r"magi_any failed with code 2: $"):
            call(76)
        call(78)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("place", -1, OverflowError),
        ("place", 2**64, OverflowError),
        ("place", None, TypeError),
        ("place", 1.5, TypeError),
        ("stride", 2**63, OverflowError),
        ("count", 2**31, OverflowError),
        ("count", -(2**31) - 1, OverflowError),
        ("number", 2**32, OverflowError),
        ("number", -1, OverflowError),
        ("scale", "1", TypeError),
        ("scale", 1e39, OverflowError),
        ("scale", -1e39, OverflowError),
    ],
)
def test_values_that_do_not_fit_are_refused_before_the_call(
    name: str, value: object, error: type[Exception], function: Any, seen: list[bytes]
) -> None:
    with pytest.raises(error):
        call_of(function, ParamTemplate(Params(), [name]))(value)
    assert not seen


def test_floats_are_what_the_pattern_makes_of_them(function: Any, seen: list[bytes]) -> None:
    pattern = ParamTemplate(Params(), ["scale"])
    call = call_of(function, pattern)
    for value in (math.inf, -math.inf, 0.0, -0.0, -1.0, 1e-50, 3.4028235e38, 3):
        call(value)
        assert seen[-1] == pattern.filled(value)
    call(math.nan)
    assert math.isnan(Params.from_buffer_copy(seen[-1]).scale)


def test_other_numbers_of_values_are_refused(function: Any, seen: list[bytes]) -> None:
    call = call_of(function, ParamTemplate(Params(), ["place", "count"]))
    for values in ((), (1,), (1, 2, 3)):
        with pytest.raises(TypeError, match=f"2 positional values are required, got {len(values)}"):
            call(*values)
    with pytest.raises(TypeError):
        call(1, count=2)
    assert not seen


def test_fields_outside_the_struct_are_refused() -> None:
    for fields in ([(28, "P")], [(33, "i")], [(0, "d")], [(2**63, "i")]):
        with pytest.raises(ValueError, match="a field must"):
            solver.prepared_call("magi_any", 8, bytes(32), fields, Refused)
    with pytest.raises(ValueError, match="a function and a struct of at most 2048 bytes"):
        solver.prepared_call("magi_any", 8, bytes(2049), [], Refused)
    with pytest.raises(ValueError, match="a function and a struct"):
        solver.prepared_call("magi_any", 0, bytes(8), [], Refused)


class Duration(Structure):
    """timespec"""

    _fields_ = [("seconds", c_int64), ("nanoseconds", c_int64)]


def test_another_thread_runs_during_a_call() -> None:
    """A launch may wait for work that only another thread enqueues."""
    nanosleep = ctypes.CDLL(None).nanosleep
    call = call_of(nanosleep, ParamTemplate(Duration(0, 500_000_000), []))
    begun, ended = threading.Event(), threading.Event()

    def run() -> None:
        begun.set()
        call()
        ended.set()

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # so that this thread runs on as soon as the call lets it
    try:
        thread = threading.Thread(target=run)
        thread.start()
        begun.wait()
        ran_meanwhile = not ended.is_set()
    finally:
        sys.setswitchinterval(usual)
    thread.join()
    assert ran_meanwhile


def test_only_the_library_makes_calls(function: Any) -> None:
    """One without a function would end the process."""
    call = call_of(function, ParamTemplate(Params(), ["count"]))
    for make in (type(call), lambda: copy.copy(call), lambda: object.__new__(type(call))):
        with pytest.raises(TypeError):
            make()


def test_a_call_is_freed(function: Any) -> None:
    class Own(RuntimeError):
        pass

    ended = weakref.ref(Own)
    pattern = ParamTemplate(Params(), ["count"])
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    for _ in range(100):
        solver.prepared_call("magi_any", address, pattern.params, pattern.fields, Own)(1)
    del Own
    gc.collect()
    assert ended() is None
