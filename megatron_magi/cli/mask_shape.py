"""Mask options of a command's documents: causal, full, windows, prefixes, blocks, or a
function of the user."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Container
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from megatron_magi.cli.parser import UsageError, numbers

if TYPE_CHECKING:  # the options and their help need no torch
    from megatron_magi import AttnMask

SHAPE_OPTIONS = (
    *("full", "window", "global_tokens", "prefix", "block_tokens", "block_window", "mask", "total"),
)
"""Options of `add_shape_options`, as argparse names them."""
OF_A_RULE = {
    "prefix": ("total",),
    "block_tokens": ("block_window", "total"),
    "mask": (),
}
"""Options that are a whole rule, and those that each may be combined with."""


def add_shape_options(group: argparse._ArgumentGroup) -> None:
    """The options of `mask_of_documents`."""
    group.add_argument(
        "--full", action="store_const", const=True, help="not causal inside documents"
    )
    group.add_argument("--window", metavar="L[,R]", help="keys left and right of a query")
    group.add_argument("--global-tokens", type=int, metavar="G",
                       help="with --window: keys that all of a document see")  # fmt: skip
    group.add_argument("--prefix", type=int, metavar="P",
                       help="prefix-LM: a document's first P tokens see each other")  # fmt: skip
    group.add_argument("--block-tokens", type=int, metavar="B",
                       help="a token sees its block of B tokens and earlier ones")  # fmt: skip
    group.add_argument("--block-window", type=int, metavar="W",
                       help="with --block-tokens: only the last W blocks")  # fmt: skip
    group.add_argument("--mask", metavar="MODULE:FUNCTION",
                       help="as the launcher's --magi-mask; or FILE.py:FUNCTION")  # fmt: skip
    group.add_argument("--total", type=int, help="tokens with padding after the documents")


def mask_of_documents(cu_seqlens: Any, options: argparse.Namespace) -> tuple[AttnMask, str]:
    """The mask that the options make of documents, and its rule for people.

    Raises:
        UsageError: two rules at once, or a part without its rule.
    """
    rule = _rule(options)
    each = " inside each" * (len(cu_seqlens) > 2)
    if rule == "mask":
        return _by_function(cu_seqlens, options.mask), f"masked by {options.mask}"
    if rule == "prefix":
        return _with_prefixes(
            cu_seqlens, options
        ), f"causal after a prefix of {options.prefix}" + each
    if rule == "block_tokens":
        last = "" if options.block_window is None else f", the last {options.block_window} seen"
        return _in_blocks(cu_seqlens, options), f"blocks of {options.block_tokens}{last}" + each
    mask, text = _in_windows(cu_seqlens, options)
    return mask, text + each


def refuse_shape_of(options: argparse.Namespace) -> None:
    """Raise UsageError if the options shape documents, where the mask has none."""
    for name in given_shape(options):
        raise UsageError(
            f"--ranges are the whole mask, got {flag_of(name)} with it; drop one of them"
        )


def given_shape(options: argparse.Namespace) -> list[str]:
    """Those of `SHAPE_OPTIONS` that the user gave."""
    return [name for name in SHAPE_OPTIONS if getattr(options, name) is not None]


def flag_of(name: str) -> str:
    """The option as it is written."""
    return f"--{name.replace('_', '-')}"


def _rule(options: argparse.Namespace) -> str | None:
    """The option that is the whole rule; None: causal, full and windows."""
    given = given_shape(options)
    if "block_window" in given and "block_tokens" not in given:
        raise UsageError("--block-window needs --block-tokens, got none; pass it, or use --window")
    rule = next((name for name in OF_A_RULE if name in given), None)
    if rule is None:
        return None
    other = [name for name in given if name != rule and name not in OF_A_RULE[rule]]
    if other:
        raise UsageError(
            f"{flag_of(rule)} is a whole rule, got {flag_of(other[0])} with it; drop one of them"
        )
    return rule


def _by_function(cu_seqlens: Any, name: str) -> AttnMask:
    from megatron_magi.launcher.documents import MaskRequest, checked_mask
    from megatron_magi.launcher.flags import load_mask_function

    if "" not in sys.path:  # as python -m has it; the command's own script does not
        sys.path.insert(0, "")
    function = load_mask_function(name, "--mask")
    try:
        mask = function(MaskRequest(tuple(int(bound) for bound in cu_seqlens), None))
    except Exception as error:  # a function of the user may raise anything
        raise UsageError(
            f"--mask must name a function that makes a mask of document boundaries without a "
            f"batch, got {type(error).__name__}: {error} from {name}; mend it"
        ) from error
    mask = checked_mask(mask, "--mask")
    total, shape = int(cu_seqlens[-1]), (mask.total_seqlen_q, mask.total_seqlen_k)
    if shape != (total, total):
        raise UsageError(
            f"the function of --mask must return a mask of all {total} tokens, got one of "
            f"{shape[0]} x {shape[1]} from {name}; build it for request.total_seqlen"
        )
    return mask


def _with_prefixes(cu_seqlens: Any, options: argparse.Namespace) -> AttnMask:
    from megatron_magi import masks

    lengths = [min(options.prefix, int(end - start)) for start, end in pairwise(cu_seqlens)]
    return masks.prefix_lm(cu_seqlens, lengths, total_seqlen=options.total)


def _in_blocks(cu_seqlens: Any, options: argparse.Namespace) -> AttnMask:
    from megatron_magi import masks

    size = options.block_tokens
    if size < 1:
        raise UsageError(f"--block-tokens must be at least 1, got {size}; such as 1024")
    blocks = []
    for start, end in pairwise(cu_seqlens):
        whole, rest = divmod(int(end - start), size)
        blocks.append([size] * whole + [rest] * (rest > 0))
    return masks.block_causal(blocks, window=options.block_window, total_seqlen=options.total)


def _in_windows(cu_seqlens: Any, options: argparse.Namespace) -> tuple[AttnMask, str]:
    from megatron_magi import masks

    window, text = _window(options), "full" if options.full else "causal"
    if options.global_tokens:
        if window is None:
            raise UsageError("--global-tokens needs --window; full attention sees them anyway")
        if not options.full:
            window = (window[0], 0)
        text += f", window {window}, {options.global_tokens} global tokens"
        count, total = options.global_tokens, options.total
        return masks.global_and_window(cu_seqlens, window, count, total_seqlen=total), text
    mask = masks.from_cu_seqlens(
        cu_seqlens,
        causal=not options.full,
        window_size=window or (-1, -1),
        total_seqlen=options.total,
    )
    return mask, text + (f", window {window}" if window else "")


def _window(options: argparse.Namespace) -> tuple[int, int] | None:
    if options.window is None:
        return None
    given = options.window.replace("-1", str(2**30))
    sides = few_numbers(given, "--window", "L or L,R", (1, 2), "1024", options.window)
    left, right = (-1 if side == 2**30 else side for side in (*sides, 0)[:2])
    return left, right


def few_numbers(
    text: str, option: str, form: str, counts: Container[int], example: str, shown: str = ""
) -> list[int]:
    """The numbers of an option that takes a few of them.

    Args:
        form: for people: what the numbers are.
        counts: how many there may be.
        shown: what the user wrote, if it was not `text`.

    Raises:
        UsageError: no numbers, or another count.
    """
    try:
        values = numbers(text)
    except UsageError:
        values = []
    if len(values) not in counts:
        raise UsageError(f"{option} must be {form}, got {shown or text!r}; such as {example}")
    return values
