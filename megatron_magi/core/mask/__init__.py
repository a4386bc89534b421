"""L0: which query sees which key. Pure values."""

from megatron_magi.core.mask.mask import AttnMask
from megatron_magi.core.mask.slices import AttnSlice, SliceType
from megatron_magi.core.mask.tree import PrefixTree

__all__ = ["AttnMask", "AttnSlice", "PrefixTree", "SliceType"]
