"""The checked edge: what public functions take, or one error in three parts.

Every check returns the value in its plain Python form (numpy's 128 as 128), so that equal inputs
have equal digests on every rank, and costs a type comparison where the value has that form already.
TypeError: another kind of value. ValueError: the kind, but not the range.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # recipes and the command line start without numpy
    import numpy as np
    import numpy.typing as npt

INT32_MAX = 2**31 - 1


def integer(value: Any, name: str, low: int | None = None, high: int | None = None) -> int:
    """An integer of any kind (numpy's, whatever has ``__index__``) but no bool, as an int.

    Args:
        name: What the caller calls it, for the error.
        low, high: The bounds, both allowed; None: none.
    """
    if type(value) is not int:
        try:
            if is_bool(value):  # True counts as 1 nowhere: where an integer is meant it is a slip
                raise TypeError
            value = int(operator.index(value))
        except (TypeError, RuntimeError):  # RuntimeError: a tensor that has no value
            raise TypeError(
                f"{name} must be an integer, got {shown(value)}; pass a whole number as int"
            ) from None
    if (low is not None and value < low) or (high is not None and value > high):
        raise ValueError(f"{name} must be {_bounds(low, high)}, got {value}; pass one in range")
    return int(value)


def is_integer_like(value: Any) -> bool:
    """True if `integer` is the check for it, where something else may be meant as well."""
    return hasattr(value, "__index__") and not getattr(value, "ndim", 0)


def optional_integer(
    value: Any, name: str, low: int | None = None, high: int | None = None
) -> int | None:
    """An integer that passes `integer`, or None."""
    return None if value is None else integer(value, name, low, high)


def number(value: Any, name: str) -> float:
    """A finite number of any kind (numpy's, a tensor of one element) but no bool, as a float."""
    made = number_or_infinite(value, name)
    if not math.isfinite(made):
        raise ValueError(f"{name} must be finite, got {made}; pass an ordinary number")
    return made


def number_or_infinite(value: Any, name: str) -> float:
    """A value that passes `number`, or inf or nan. A tensor that requires a gradient is refused."""
    if type(value) is float:
        return value
    if getattr(value, "requires_grad", False):
        raise TypeError(
            f"{name} must be a number, got a tensor that requires a gradient, which it would not "
            f"get; pass x.item(), or multiply a tensor by it yourself"
        )
    try:
        # float() would take text, and an array of one element.
        if isinstance(value, (str, bytes)) or is_bool(value) or getattr(value, "ndim", None):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(f"{name} must be a number, got {shown(value)}; pass a float") from None


def flag(value: Any, name: str) -> bool:
    """True or False, also numpy's."""
    if value is True or value is False or _is_numpy_bool(type(value)):
        return bool(value)
    raise TypeError(f"{name} must be True or False, got {shown(value)}; pass one of them")


def instance(value: Any, kind: type | tuple[type, ...], name: str, remedy: str) -> None:
    """A value of a class; ``remedy`` says how to get one."""
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        wanted = " or ".join("None" if k is type(None) else k.__name__ for k in kinds)
        article = "an" if wanted[0] in "AEIOU" else "a"
        raise TypeError(f"{name} must be {article} {wanted}, got {shown(value)}; {remedy}")


def word(value: Any, name: str, choices: tuple[str, ...]) -> str:
    """One of a few words."""
    if not isinstance(value, str) or value not in choices:
        *first, last = map(repr, choices)
        listed = f"{', '.join(first)} or {last}" if first else last
        kind = ValueError if isinstance(value, str) else TypeError
        raise kind(f"{name} must be {listed}, got {shown(value)}; use one of them")
    return value


def pair(value: Any, name: str, parts: str) -> tuple[Any, Any]:
    """Two of something; ``parts`` names them, e.g. "(left, right)"."""
    try:
        if isinstance(value, (str, bytes, dict)):
            raise TypeError
        first, second = value
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"{name} must be a pair {parts}, got {shown(value)}; pass two integers"
        ) from None
    return first, second


def integers(values: Any, name: str) -> list[int]:
    """A flat row of integers as a list; arrays and tensors on the CPU count too."""
    array = int_array(values, name)
    if array.ndim != 1:
        raise ValueError(
            f"{name} must be one row of integers, got shape {list(array.shape)}; flatten it"
        )
    return array.tolist()


def int_array(values: Any, name: str) -> npt.NDArray[np.int64]:
    """int64 values of a list, array or CPU tensor of integers; nothing is rounded or wrapped.

    An empty list holds integers.
    """
    import numpy as np

    remedy = "pass a list, an array or a CPU tensor of integers"
    array = as_array(values, f"{name} must hold integers", remedy)
    if array.size == 0 and array.ndim and array.dtype != np.bool_:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu" or _has_bool(values):  # timedelta64 is a np.integer
        what = "bool" if _has_bool(values) else f"{array.dtype} {list(array.shape)}"
        raise TypeError(f"{name} must hold integers, got {what}; convert it first")
    if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise ValueError(
            f"{name} must fit in int64, got values up to {array.max()}; "
            f"perhaps a negative number was stored as uint64"
        )
    return array.astype(np.int64)


def as_array(values: Any, required: str, remedy: str) -> npt.NDArray[Any]:
    """An array of a list, array or CPU tensor; ``required`` and ``remedy`` are for the error."""
    import numpy as np

    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged, on a GPU, needs a gradient
        why = str(error).splitlines()[0]
        raise TypeError(f"{required}, got {shown(values)} ({why}); {remedy}") from None


def shown(value: Any) -> str:
    """A value in an error: a short one as it is written, a long one by its class."""
    try:
        if getattr(value, "ndim", 0) and hasattr(value, "dtype"):
            return f"{type(value).__name__} {value.dtype} {list(value.shape)}"
        text = repr(value)
    except Exception:  # a foreign class, or a nested tensor; magi's error must still come
        text = ""
    return text if text and len(text) <= 60 and "\n" not in text else type(value).__name__


def is_bool(value: Any) -> bool:
    """A truth value of any library."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")


def _is_numpy_bool(kind: type) -> bool:
    return kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")


def _has_bool(values: Any) -> bool:
    """True if True stands among integers, of which numpy makes 1."""
    if not isinstance(values, (list, tuple)):
        return False
    kinds = set(map(type, values))
    if bool in kinds or any(map(_is_numpy_bool, kinds)):
        return True
    return any(k in kinds for k in (list, tuple)) and any(map(_has_bool, values))


def _bounds(low: int | None, high: int | None) -> str:
    if high is None:
        return f"at least {low}"
    return f"at most {high}" if low is None else f"between {low} and {high}"
