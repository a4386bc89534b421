"""The mask of video.yaml: block-causal over frames."""

from itertools import pairwise

from megatron_magi import AttnMask
from megatron_magi.launcher.documents import MaskRequest
from megatron_magi.masks import block_causal

FRAME = 1536
"""Tokens of a frame."""


def frames(request: MaskRequest) -> AttnMask:
    """Every frame sees itself and the earlier frames of its own sequence."""
    lengths = [end - start for start, end in pairwise(request.bounds)]
    blocks = [[FRAME] * (n // FRAME) + [n % FRAME] * (n % FRAME > 0) for n in lengths]
    return block_causal(blocks)
