"""Everything that keeps a parsed job from running with `--attention-backend magi`."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any
from unittest import mock

from megatron_magi.launcher import refusals
from megatron_magi.launcher.state_refusals import PACKAGES


def reasons(args: Any) -> dict[str, str]:
    """Each thing that keeps the job out, by a stable name, with its line.

    Without effect by design, and so not among them: `--cp-comm-type` (our plan is the
    communication), `--attention-softmax-in-fp32` (it always is), `--apply-query-key-layer-scaling`
    (it scales scores and softmax by inverse factors), `--no-masked-softmax-fusion`,
    `--use-flash-attn`, `--flash-decode` (inference), both flags about masks in the data loader (the
    plan holds the mask), and `--ddp-average-in-collective`, which the launcher switches off and
    says so.

    Args:
        args: As Megatron's parser returns it, before `validate_args`, where the launcher checks it.
    """
    with packages_present():
        return {key_of(line): line for line in refusals.refusals(args)}


def key_of(line: str) -> str:
    """The flag in brackets, or else the first one after our switch."""
    in_brackets = re.search(r"\((--[a-z0-9-]+)", line)
    if in_brackets:
        return in_brackets.group(1)
    flags = re.findall(r"--[a-z][a-z0-9-]*", line.replace("--attention-backend magi", ""))
    return flags[0] if flags else line


@contextlib.contextmanager
def packages_present() -> Iterator[None]:
    """Let the rules find TransformerEngine and the kernels of layers with state, which published
    jobs may assume."""
    find = importlib.util.find_spec
    assumed = {"transformer_engine", *chain.from_iterable(PACKAGES.values())}

    def find_also(name: str, *rest: Any) -> Any:
        return object() if name in assumed else find(name, *rest)

    with mock.patch("importlib.util.find_spec", find_also):
        yield
