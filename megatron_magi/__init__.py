"""Load-balanced context parallelism for stock Megatron-Core: any mask, no redundant byte."""

from megatron_magi import masks
from megatron_magi.config import MagiConfig
from megatron_magi.core.mask import AttnMask, AttnMaskType, AttnSlice

__version__ = "0.1.0"

__all__ = ["AttnMask", "AttnMaskType", "AttnSlice", "MagiConfig", "masks"]
