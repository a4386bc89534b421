"""What an argument takes, as the values that it must not take."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

NAN = float("nan")
INF = float("inf")


@dataclass(frozen=True)
class Kind:
    """The bad values of one kind of argument, each with words that its error must have."""

    bad: tuple[tuple[Any, str], ...]
    is_integer: bool = False
    """Whether other classes' integers are good."""

    def without(self, value: Any) -> Kind:
        """The kind where this value is good after all, e.g. None for what is optional."""
        kept = tuple(b for b in self.bad if not (b[0] is value or _is_same(b[0], value)))
        assert len(kept) == len(self.bad) - 1, value
        return replace(self, bad=kept)

    def also(self, *bad: tuple[Any, str]) -> Kind:
        return replace(self, bad=self.bad + bad)


def _is_same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and isinstance(a, (float, str, list)) and a == b


def everything(words: str, *values: Any) -> Kind:
    """Values that are all refused in the same words."""
    return Kind(tuple((value, words) for value in values))


def nested(layout: torch.layout) -> torch.Tensor:
    """Two documents; a strided one has no shape, and raises PyTorch's internal errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are a prototype
        return torch.nested.nested_tensor([torch.zeros(2, 8), torch.zeros(3, 8)], layout=layout)


def config(name: str) -> Kind:
    """An instance of one of the configuration classes."""
    return everything(f"must be a {name}", {}, "config", 3, True)


RAGGED = [[0], [1, 2]]
INT = replace(
    everything("integer", 3.9, 1.0, "3", True, NAN, np.float32(2), np.bool_(True), None),
    is_integer=True,
).also((np.array([1, 2]), "integer"))
COUNT = INT.also((-1, "-1"))
POSITIVE = COUNT.also((0, "0"))
NUMBER = everything("number", "0.5", True, 1j, np.array([1.0, 2.0]), torch.zeros(2), None)
FINITE = NUMBER.also((NAN, "finite"), (INF, "finite"), (-INF, "finite"))
SCALE = FINITE.without(None).also((0.0, "must be between"), (-1.0, "must be between"))
SOFTCAP = FINITE.also((-1.0, "softcap must be"))
SOFTMAX = everything("must be a Softmax", 0.5, {"scale": 1.0}, None)
FLAG = everything("True or False", 1, 0.0, "no", np.array([True]), None)
WORD = everything("must be", 3, "nonsense", ["auto"], np.array(["a", "b"]), None)
DEVICE = everything("must be a torch device", 3.5, "nonsense", ["cpu"], None, "cuda:99")

TENSOR = everything("must be a Tensor", np.zeros((4, 2, 8), np.float32), [1.0], "q", 3, None).also(
    *((nested(layout), "nested tensor") for layout in (torch.strided, torch.jagged)),
)
INT_TENSOR = TENSOR.also(
    (torch.zeros(1, 2), "must hold integers"),
    (torch.zeros(1, 2, dtype=torch.int32, device="meta"), "with values"),
    (torch.zeros(1, 2, dtype=torch.int32).to_sparse(), "dense tensor"),
)
PLAN = everything("must be an AttnPlan", np.zeros(3), "plan", 3, {}, None)
KEPT = everything("must be a DerivedCache", {}, "plan", 3, None)
LAYOUT = everything("must be a TokenLayout", np.zeros(3), "plan", 3, {}, None)
KEY = everything("must be a DistAttnRuntimeKey", np.zeros(3), "key", 3, {}, None)
MASK = everything("must be an AttnMask", np.zeros((2, 2), bool), "causal", 3, None)
GROUP = everything("cp_group must be a ProcessGroup", np.zeros(3), "cp", {}, 1.5)
HEADS = everything("must be a HeadShape", (4, 2, 8), "heads", 3, None)

WINDOW = everything("window_size must be", 4, (1, 2, 3), "ab", None).also(
    ((NAN, 0), "integer"),
    ((1.5, 0), "integer"),
    ((True, 0), "integer"),
    ((0, None), "integer"),
    ((-2, 0), "-"),
)
INTS = everything("integers", [0, 1.5], [0, True], [0, None], "abc", ["0", "4"], RAGGED, 1.5).also(
    (None, "integers"),
    (np.array([0, 2**64 - 1], np.uint64), "int64"),
    (torch.zeros(2, requires_grad=True), "integers"),
    ({0: 1}, "integers"),
)
SUMS = INTS.also(([1, 4], "0"), ([0, 4, 2], "decrease"), (np.array([0, 4, 2], np.uint64), "decr"))
ROWS = everything("integers", [[0, 1.5]], [[0, True]], "abc", RAGGED, [["0", "4"]], None).also(
    (np.array([[0, 2**64 - 1]], np.uint64), "int64"), ([0, 4], "shape")
)
RANGE = everything("pair", 3, (1, 2, 3), {}, None).also(
    ((0, 1.5), "integer"), ("ab", "pair"), ((5, 2), "start <= end")
)
RANGES = everything("must be an AttnRanges", 3, [[0, 1]], "ab", np.zeros((1, 2), int), None)
TYPE = everything("mask", 3, "casual", [3], None, NAN)
