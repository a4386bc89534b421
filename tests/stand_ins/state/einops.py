"""The two functions of einops that Megatron's layers with state call, on reshapes of torch."""

from __future__ import annotations

import math
import re

from torch import Tensor

__version__ = "0.8.0"


def rearrange(x: Tensor, pattern: str, **sizes: int) -> Tensor:
    """Split, permute and join dimensions as the pattern says."""
    return repeat(x, pattern, **sizes)


def repeat(x: Tensor, pattern: str, **sizes: int) -> Tensor:
    """`rearrange`, and a copy along each name that only the right side has."""
    left, right = (_groups(side) for side in pattern.split("->"))
    for length, group in zip(x.shape, left, strict=True):
        unknown = [name for name in group if name not in sizes]
        if unknown:
            known = math.prod(sizes[name] for name in group if name in sizes)
            sizes[unknown[0]] = length // known
    names = [name for group in left for name in group]
    wanted = [name for group in right for name in group]
    x = x.reshape([sizes[name] for name in names])
    for name in wanted:
        if name not in names:
            names.append(name)
            x = x.unsqueeze(-1).expand(*x.shape, sizes[name])
    x = x.permute([names.index(name) for name in wanted])
    return x.reshape([math.prod(sizes[name] for name in group) for group in right])


def _groups(side: str) -> list[list[str]]:
    """Names of every dimension; a 1 has none."""
    found = re.findall(r"\(([^)]*)\)|(\S+)", side)
    return [[n for n in (joined or single).split() if n != "1"] for joined, single in found]
