"""A function for `--magi-mask`: window layers see chunks of 24 tokens, other layers everything."""

from __future__ import annotations

from megatron_magi import AttnMask
from megatron_magi.launcher.documents import MaskRequest
from megatron_magi.masks import chunked, from_cu_seqlens

CHUNK = 24


def chunks_in_window_layers(request: MaskRequest) -> tuple[AttnMask, AttnMask]:
    return from_cu_seqlens(request.bounds), chunked(request.bounds, CHUNK)


def chunks(request: MaskRequest) -> AttnMask:
    return chunked(request.bounds, CHUNK)
