"""A `--magi-mask` function that is wrong by one token: the negative control of the quick start."""

from megatron_magi import AttnMask, masks
from megatron_magi.launcher.documents import MaskRequest


def moved_boundary(request: MaskRequest) -> AttnMask:
    """Moves the first boundary between two documents by one token."""
    bounds = list(request.bounds)
    if len(bounds) > 2:
        bounds[1] += 1
    return masks.from_cu_seqlens(bounds)
