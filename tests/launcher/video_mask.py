"""A function for `--magi-mask`: frames of 24 tokens see themselves and every earlier frame."""

from __future__ import annotations

from megatron_magi import AttnMask
from megatron_magi.launcher.documents import MaskRequest
from megatron_magi.masks import block_causal

FRAME = 24


def frames(request: MaskRequest) -> AttnMask:
    return block_causal([FRAME] * (request.total_seqlen // FRAME))


def not_a_mask(request: MaskRequest) -> str:
    return "causal"
