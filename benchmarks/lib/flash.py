"""FlashAttention-3 and 4 and MagiAttention's kernel, as far as they can be imported."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.lib.cell import Call, Case, Direction, Inputs, autograd_call
from benchmarks.lib.masks import BlockCausal, block_causal, cu_seqlens
from megatron_magi.magi_attention.mask_type import typed_slices


class Imported:
    """A peer behind a module that may not be there. What lies below its differentiable functions is
    its own affair and changes between its versions, so it is timed through autograd only."""

    module: str

    @functools.cached_property
    def package(self) -> Any:
        return importlib.import_module(self.module)

    def missing(self) -> str | None:
        try:
            _ = self.package
        except (ImportError, OSError) as error:
            return f"{self.module} cannot be imported: {error}"
        return None


class Flash3(Imported):
    """Dense masks by its batched function, documents by the packed one."""

    module = "flash_attn_interface"

    def refuses(self, case: Case, direction: Direction) -> str | None:
        if case.documents is None and (direction == "bwd" or case.name != "packed_block_causal"):
            return f"no {direction} for this mask"
        return None

    def call(self, case: Case, direction: Direction, x: Inputs) -> Call:
        if case.documents is None:
            blocks, function = block_causal(case.seqlen), self.package.flash_attn_varlen_func
            arguments = _block_arguments(blocks, x.q.device) | _asked_for(case)
            return autograd_call(
                lambda q, k, v: _first(function(q, k, v, **arguments)), direction, x
            )
        return autograd_call(self.attend(case, x.q.device), direction, x)

    def attend(self, case: Case, device: torch.device) -> Any:
        docs = case.documents
        assert docs is not None
        rule: dict[str, Any] = {"causal": docs.causal}
        if docs.window is not None:
            rule = {"window_size": (docs.window - 1, 0)}
        rule |= _asked_for(case)
        if len(docs.lengths) == 1:
            dense = self.package.flash_attn_func
            # squeeze, because the gradient of [0] is cleared and copied.
            return lambda q, k, v: _first(dense(q[None], k[None], v[None], **rule)).squeeze(0)
        packed, longest = self.package.flash_attn_varlen_func, max(docs.lengths)
        cu = _ints(cu_seqlens(docs.lengths), device)
        sizes = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest)
        return lambda q, k, v: _first(packed(q, k, v, **sizes, **rule))


class Flash4(Flash3):
    """The same two functions, without keys that begin elsewhere than their document."""

    module = "flash_attn.cute.interface"

    def refuses(self, case: Case, direction: Direction) -> str | None:
        return None if case.documents is not None else "no documents in this mask"


class Ffa(Imported):
    """MagiAttention's flex_flash_attn_func with its default switches; takes every mask."""

    module = "magi_attention.functional"

    def refuses(self, case: Case, direction: Direction) -> str | None:
        return None

    def call(self, case: Case, direction: Direction, x: Inputs) -> Call:
        q_ranges, k_ranges, types = typed_slices(case.mask.slices)
        parts = (
            q_ranges.to_naive_ranges(),
            k_ranges.to_naive_ranges(),
            [kind.to_int_type() for kind in types],
        )
        ranges = [_ints(part, x.q.device) for part in parts]
        function = functools.partial(self.package.flex_flash_attn_func, **_asked_for(case))
        return autograd_call(lambda q, k, v: _first(function(q, k, v, *ranges)), direction, x)


def _asked_for(case: Case) -> dict[str, Any]:
    """All three packages have these names for it."""
    return {"softcap": case.softcap, "deterministic": case.deterministic}


def _first(result: Any) -> Tensor:
    """Functions return out, or a tuple that begins with it."""
    return result[0] if isinstance(result, tuple) else result


def _ints(values: Any, device: torch.device) -> Tensor:
    return torch.as_tensor(np.asarray(values, dtype=np.int32), device=device)


def _block_arguments(blocks: BlockCausal, device: torch.device) -> dict[str, Any]:
    """Every block of queries is a document that uses the keys up to its own end."""
    return {
        "cu_seqlens_q": _ints(blocks.cu_queries, device),
        "cu_seqlens_k": _ints(blocks.first_keys, device),
        "seqused_k": _ints(blocks.num_keys, device),
        "max_seqlen_q": blocks.longest_query,
        "max_seqlen_k": max(blocks.num_keys),
    }
