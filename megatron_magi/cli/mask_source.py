"""The mask that a command is given: by lengths, a data file or ranges."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from megatron_magi.checks import integer
from megatron_magi.cli.errors import encoding_error, file_error
from megatron_magi.cli.mask_shape import (
    add_shape_options,
    few_numbers,
    mask_of_documents,
    refuse_shape_of,
)
from megatron_magi.cli.parser import UsageError, numbers
from megatron_magi.config import ForwardMode, MagiConfig

if TYPE_CHECKING:  # the options and their help need no torch
    from megatron_magi import AttnMask, HeadShape

RANGE_NAMES = {"q_ranges", "k_ranges", "total", "attn_type_map"}
"""Of a file of ranges."""


@dataclass(frozen=True)
class PlanInput:
    """A mask and what it is planned with."""

    mask: AttnMask
    text: str
    """Description of the mask for people."""
    cp_size: int
    head_shape: HeadShape
    config: MagiConfig
    token_multiple: int


def add_mask_options(parser: argparse.ArgumentParser) -> None:
    """Where the mask comes from, what it looks like, and what it is planned with."""
    where = parser.add_argument_group("mask (one of these)").add_mutually_exclusive_group()
    where.add_argument("--lengths", metavar="N,N,..", help="document lengths: 4096,8192x3")
    where.add_argument(
        "--cu-seqlens", metavar="0,N,..", help="their prefix sums, or @FILE that holds them"
    )
    where.add_argument("--data", metavar="PREFIX", help="a sample of PREFIX.bin and PREFIX.idx")
    where.add_argument(
        "--ranges", metavar="JSON", help="a file with q_ranges, k_ranges, attn_type_map, total"
    )
    look = parser.add_argument_group("its shape")
    add_shape_options(look)
    look.add_argument("--sample", type=int, help="which packed sample of --data (default 0)")
    look.add_argument("--seq-length", type=int, help="tokens of a sample (with --data)")
    look.add_argument(
        "--eod-token",
        type=int,
        help="id that ends a document inside a sequence of the index (with --data)",
    )
    how = parser.add_argument_group("planned with")
    how.add_argument("--cp", type=int, help="context-parallel ranks")
    how.add_argument("--ranks-per-node", type=int, help="of the cp ranks (default: one node)")
    how.add_argument("--heads", metavar="Q,KV,DIM[,V]",
                     help="query and key/value heads, head_dim of a rank (32,8,128 or 32/8x128); "
                     "that of values if it is another")  # fmt: skip
    how.add_argument("--chunk-size", type=int, help="tokens per chunk (default: chosen)")
    how.add_argument("--overlap-degree", type=int, help="remote stages (default: chosen)")
    how.add_argument("--forward-mode", choices=get_args(ForwardMode), help="(default: chosen)")
    how.add_argument("--token-multiple", type=int, help="tokens per rank divide by it (TP size)")


def plan_input(options: argparse.Namespace) -> PlanInput:
    """The mask and settings that the options name.

    Raises:
        UsageError: the options name no mask, or something wrong.
    """
    try:
        from megatron_magi import HeadShape

        mask, text = _mask(options)
        plain = PlanInput(mask, text, 0, HeadShape(32, 8, 128), MagiConfig(), 1)
        return _with_options(plain, options)
    except OSError as error:
        raise UsageError(file_error(error)) from error
    except (ValueError, TypeError, ImportError) as error:
        raise UsageError(str(error)) from error


def refuse_empty(given: PlanInput, what: str) -> None:
    """Raise UsageError, in the words of dispatch, for a mask over no tokens."""
    if given.mask.total_seqlen_q == 0:
        raise UsageError(
            f"{what} needs at least one token, got an empty sequence; name other lengths"
        )


def _with_options(given: PlanInput, options: argparse.Namespace) -> PlanInput:
    changes: dict[str, Any] = {}
    if options.cp is not None:
        changes["cp_size"] = options.cp
    if options.heads is not None:
        from megatron_magi import HeadShape

        form = "three numbers Q,KV,DIM, or four with the head_dim of values"
        given_numbers = re.sub("[/x]", ",", options.heads)
        q, kv, dim, *values = few_numbers(
            given_numbers, "--heads", form, (3, 4), "32,8,128", options.heads
        )
        changes["head_shape"] = HeadShape(q, kv, dim, head_dim_v=values[0] if values else None)
    if options.token_multiple is not None:
        changes["token_multiple"] = options.token_multiple
    names = ("chunk_size", "overlap_degree", "forward_mode")
    knobs = {name: getattr(options, name) for name in names}
    knobs = {name: value for name, value in knobs.items() if value is not None}
    if options.ranks_per_node is not None:
        knobs["costs"] = replace(given.config.costs, ranks_per_node=options.ranks_per_node)
    changes["config"] = replace(given.config, **knobs)
    made = replace(given, **changes)
    if made.cp_size < 1:
        got = "none" if options.cp is None else options.cp
        raise UsageError(
            f"the number of context-parallel ranks is needed, at least 1, got {got}; pass --cp N"
        )
    return made


def _mask(options: argparse.Namespace) -> tuple[AttnMask, str]:
    import numpy as np

    if options.data:
        return _from_data(options)
    _refuse_options_of_data(options)
    if options.ranges:
        refuse_shape_of(options)
        return _from_ranges(Path(options.ranges))
    if options.lengths:
        cu_seqlens = np.cumsum([0, *numbers(options.lengths)])
    elif options.cu_seqlens:
        given = options.cu_seqlens
        text = _text_of(Path(given[1:])) if given.startswith("@") else given
        cu_seqlens = np.array(numbers(text))
    else:
        raise UsageError(
            "a mask is needed, got none; pass --lengths, --cu-seqlens, --data or --ranges"
        )
    return _documents(cu_seqlens, options)


def _documents(cu_seqlens: Any, options: argparse.Namespace) -> tuple[AttnMask, str]:
    mask, rule = mask_of_documents(cu_seqlens, options)
    return mask, _describe(len(cu_seqlens) - 1, mask, rule)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(encoding_error(error, path)) from error


def _from_ranges(path: Path) -> tuple[AttnMask, str]:
    from megatron_magi import masks

    try:
        given = json.loads(_text_of(path))
        q_ranges, k_ranges, total = (given[name] for name in ("q_ranges", "k_ranges", "total"))
        codes = given.get("attn_type_map")
        if unknown := given.keys() - RANGE_NAMES:
            raise KeyError(f"unknown {min(unknown)}")
    except (json.JSONDecodeError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            f"--ranges must be a JSON object with q_ranges, k_ranges, total and perhaps "
            f"attn_type_map, got {path} ({error!r}); mend it"
        ) from error
    mask = masks.from_ranges(q_ranges, k_ranges, codes, total_seqlen_q=total)
    return mask, _describe(len(q_ranges), mask, "as ranges", "slice")


def _from_data(options: argparse.Namespace) -> tuple[AttnMask, str]:
    from megatron_magi.launcher.file_samples import FileSamples, open_index

    if options.seq_length is None:
        raise UsageError("--data needs --seq-length, the tokens of a packed sample")
    samples = FileSamples(open_index(options.data), options.seq_length, eod=options.eod_token)
    sample = integer(options.sample or 0, "--sample", 0, len(samples) - 1)
    return _documents(samples.boundaries(sample), options)


def _refuse_options_of_data(options: argparse.Namespace) -> None:
    names = ("sample", "seq_length", "eod_token")
    found = [name for name in names if getattr(options, name) is not None]
    if found:
        raise UsageError(
            f"--{found[0].replace('_', '-')} requires --data, got none; pass --data PREFIX, or "
            f"leave it out"
        )


def _describe(count: int, mask: AttnMask, kind: str, noun: str = "document") -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}, {mask.total_seqlen_q:,} tokens, {kind}"
